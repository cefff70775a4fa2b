"""Uniform random bits for batches: the operating system's, or those of a seed. What is drawn from them is exact.

Uniform 64-bit words are all that is assumed. Nothing here computes in floating point.
"""

import numbers
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from gradclip._src.words import typed

if TYPE_CHECKING:
    Generator: TypeAlias = np.random.Generator

_AT_ONCE = 1 << 18  # words: 2 MiB


class Draws(Protocol):
    """A source of uniform 64-bit words. `secure`: nobody can predict or repeat them."""

    secure: bool

    def words(self, count: int) -> np.ndarray:
        """Return independent uniform words, as uint64."""
        ...


class SystemDraws:
    """The cryptographic generator of the operating system."""

    secure = True

    def words(self, count: int) -> np.ndarray:
        """Return independent uniform words, as uint64."""
        return np.frombuffer(os.urandom(8 * count), np.uint64)


class Keystream:
    """AES-256 in counter mode, by the package cryptography, with a key that the operating system draws for each object.

    Its words cannot be told from uniform ones if AES-256 is what it is taken for. A forked process repeats them, so no
    object is kept for longer than a call.
    """

    secure = True

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._next = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return independent uniform words, as uint64."""
        into = np.empty(count + 2, np.uint64)  # the cipher asks for a block more
        self._next.update_into(_zeros(8 * count), into.view(np.uint8).data)
        return into[:count]


@lru_cache(maxsize=4)
def _zeros(size: int) -> bytes:
    return bytes(size)


def keystream() -> Draws:
    """Return words of a new key, or the operating system's where the package cryptography is not there or too old."""
    try:
        return Keystream()
    except (ImportError, AttributeError):
        return SystemDraws()


class SeededDraws:
    """A NumPy generator: whoever knows the seed knows every word."""

    secure = False

    def __init__(self, generator: "Generator") -> None:
        self.generator = generator

    def words(self, count: int) -> np.ndarray:
        """Return independent uniform words, as uint64."""
        return self.generator.integers(0, 2**64, count, np.uint64)


def draws_from(seed: "int | Generator | None") -> Draws:
    """Return the system's words for None, else those of a seed. An int starts them anew, a generator goes on."""
    if seed is None:
        return SystemDraws()
    return SeededDraws(seed if isinstance(seed, np.random.Generator) else np.random.default_rng(int(seed)))


def check_seed(seed: object) -> None:
    """Raise a TypeError or ValueError for anything but None, an int or a NumPy generator."""
    if seed is None or isinstance(seed, np.random.Generator):
        return
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(
            f"seed must be None for the system's random numbers, an int or a numpy.random.Generator, got {typed(seed)}."
        )
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed!r}.")


def chosen(draws: Draws, count: int, threshold: int) -> np.ndarray:
    """Return which of the numbers below `count` are chosen, each independently with probability threshold / 2**53."""
    found = [
        start + np.flatnonzero((draws.words(min(_AT_ONCE, count - start)) >> np.uint64(11)) < np.uint64(threshold))
        for start in range(0, count, _AT_ONCE)
    ]
    return np.concatenate(found).astype(np.int64)


def shuffled(draws: Draws, count: int) -> np.ndarray:
    """Return the numbers below `count` in random order, each order equally likely.

    Sorts random keys. All orders of different keys are equally likely, so equal keys are drawn again.
    """
    while True:
        keys = draws.words(count)
        order = np.argsort(keys)
        ordered = keys[order]
        if not (ordered[1:] == ordered[:-1]).any():
            return order
