"""Discrete Gaussian noise on integers, drawn exactly from the operating system's random numbers, by many threads.

The noise of scale s is z with probability proportional to exp(-z**2 / (2 s**2)), for every integer z: Canonne, Kamath
and Steinke 2020, "The Discrete Gaussian for Differential Privacy". A sum beyond int64 becomes the nearest int64, which
is a function of the released sum.

"system" draws many numbers at once, with the proof below. "opendp" is OpenDP's sampler, which computes with integers
and fractions alone, one number at a time. Both let other threads run while they draw, and neither repeats itself in a
forked process: the system's random numbers have no state here, and OpenDP's notice a fork.

Discrete Gaussian noise by rejection, many draws at once: exact, from uniform bits alone.
Wanted is z with probability proportional to exp(-z**2 / (2 s**2)), for every integer z. Let t be a power of two, at
least s log 2, and let A >= (s log 2 / t)**2 / 2. An attempt draws U uniformly below t, V with probability 2**-(V + 1)
for V = 0, 1, ... (how many of a row of bits are 0), and a sign. With y = U + t V it is accepted with probability

    p = 2**V exp(-y**2 / (2 s**2) - A).

Why p is at most 1. Since y >= t V, log p <= V log 2 - (t V / s)**2 / 2 - A, and the maximum over all real V is
(s log 2 / t)**2 / 2 - A <= 0.
Why it is exact. U and V give each y >= 0 in one way, so an attempt gives y and is accepted with probability
2**-(V + 1) / t * p = exp(-y**2 / (2 s**2)) times a constant. Both signs are equally likely, and 0 with a minus is
rejected. So each accepted z has the wanted distribution. Attempts are independent, and the accepted ones are taken in
their order, so the draws are independent.

How p is compared with a uniform number W exactly. W is known by its first 53 bits, so it lies from k / 2**53 to
(k + 1) / 2**53. p in float64 is off by a relative error of less than 2**-31: where p >= 2**-54, no part of the
exponent is above 66 if V <= 40, so its roundings add up to less than 2**-43, and `numpy.exp` may be wrong in the tenth
digit. Where p is smaller, no part is above 1650 (y / s < 57), so the roundings stay below 2**-38. There W is never
decided to be below p, which needs p > 2**-53, and it is above p if k is 1 or more. If k is 0, 1e-300 stands for a p
that is flushed to 0. If both ends of W are on one side of p, whatever that error, the comparison is decided. If not,
about once in 10**9 attempts, p is computed in decimals, with bounds, and more bits of W are drawn until they decide. So
W is uniform to all its bits, and all that is assumed about floating point is that `numpy.exp` is right to nine digits.
Above a scale of 2**58, up to one attempt in 16 is beyond int64 and takes the decimals.
"""

import decimal
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np

from gradclip._src.private.noise.draws import Draws, SystemDraws

_MARGIN = 2.0**-30
_TINY = 1e-300  # p may be flushed to 0: then k = 0 decides nothing
_HALF_SQUARE = 0.240227  # above log(2)**2 / 2
_LARGEST_V = 40
_ATTEMPTS = 1 << 14  # attempts: their arrays stay in the processor's cache


class DiscreteGaussian(NamedTuple):
    """The noise that is wanted, and how attempts are made: `scale` is s, 2**`bits` is t and `shift` is A."""

    scale: float
    bits: int
    shift: float


def target_of(scale: float) -> DiscreteGaussian:
    """Return how to draw noise of standard deviation `scale`, from 1 to 2**60. Raises ValueError for others.

    >>> target_of(1024.0).bits
    10
    """
    if not 1 <= scale <= 2.0**60:
        raise ValueError(f"the standard deviation of noise on integers must be from 1 to 2**60, got {scale!r}.")
    bits = math.frexp(scale * 0.6931472)[1]  # above log 2
    return DiscreteGaussian(scale, bits, _HALF_SQUARE * math.ldexp(scale, -bits) ** 2 * (1 + 2**-40))


def with_noise(values: np.ndarray, scale: float, draws: Draws) -> np.ndarray:
    """Return int64 integers (1-D) plus independent noise. A sum beyond int64 becomes the nearest int64."""
    target, sums, start = target_of(scale), np.empty(values.shape, np.int64), 0
    while start < values.size:
        for z in _accepted(draws, target, min(_ATTEMPTS, 64 + 5 * (values.size - start) // 2)):
            own = values[start : start + z.size]
            sums[start : start + own.size] = _nearest_sums(own, z[: own.size])
            start += own.size
    return sums


def _nearest_sums(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return the sums of int64 and int64 or Python integers, clamped to int64."""
    if noise.dtype == object:
        return np.array(
            [max(-(2**63), min(2**63 - 1, int(v) + z)) for v, z in zip(values, noise, strict=True)], np.int64
        )
    sums = values + noise  # wraps around
    ends = np.where(noise < 0, -(2**63), 2**63 - 1)
    return np.where((sums < values) != (noise < 0), ends, sums)


def _accepted(draws: Draws, target: DiscreteGaussian, attempts: int) -> list[np.ndarray]:
    """Return the accepted ones of some attempts, in order: arrays of int64, or of Python integers."""
    first, second, third = draws.words(3 * attempts).reshape(3, attempts)
    lowest = (second & (~second + np.uint64(1))).astype(np.float64)
    v = np.frexp(lowest)[1].astype(np.int64) - 1  # -1 where all 64 bits are 0
    u = (first & np.uint64(2**target.bits - 1)).astype(np.int64)
    yes, no = _decided(target, u, v, third >> np.uint64(11))
    fits = (v >= 0) & (v <= min(_LARGEST_V, 2 ** (62 - target.bits) - 1))
    z = u + (np.where(fits, v, 0) << target.bits)
    minus = first >> np.uint64(63) != 0
    unsettled = ~fits | ~(yes | no)
    yes &= fits & ~(minus & (z == 0))
    z = np.where(minus, -z, z)
    pieces, start = [], 0
    for place in np.flatnonzero(unsettled).tolist():
        pieces.append(z[start:place][yes[start:place]])
        start = place + 1
        words = [int(row[place]) for row in (first, second, third)]
        exact = _one(draws, target, *words)
        if exact is not None:
            pieces.append(np.array([exact], object))
    return [*pieces, z[start:][yes[start:]]]


def _decided(target: DiscreteGaussian, u: np.ndarray, v: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which attempts are accepted, and which rejected, whatever the error of floating point."""
    away = (u + np.ldexp(v.astype(np.float64), target.bits)) / target.scale
    with np.errstate(all="ignore"):
        p = np.exp(v * math.log(2) - 0.5 * away * away - target.shift)
        low = np.ldexp(k.astype(np.float64), -53)
        return low + 2.0**-53 <= p * (1 - _MARGIN), low >= p * (1 + _MARGIN) + _TINY


def _one(draws: Draws, target: DiscreteGaussian, first: int, second: int, third: int) -> int | None:
    """Return what one attempt gives in exact arithmetic: an integer, or None if it is rejected."""
    v = 0
    while not second:
        second, v = int(draws.words(1)[0]), v + 64
    v += (second & -second).bit_length() - 1
    y, minus = (first & (2**target.bits - 1)) + (v << target.bits), first >> 63
    gamma = Fraction(y) ** 2 / (2 * Fraction(target.scale) ** 2) + Fraction(target.shift)
    if not _below(draws, third >> 11, v, gamma) or (minus and not y):
        return None
    return -y if minus else y


def _below(draws: Draws, known: int, doublings: int, gamma: Fraction) -> bool:
    """Return whether a uniform number that begins with 53 known bits is below 2**doublings * exp(-gamma)."""
    bits, digits = 53, 40
    while True:
        low, high = (2**doublings * Fraction(end) for end in _exp_bounds(gamma, digits))
        if Fraction(known + 1, 2**bits) <= low:
            return True
        if Fraction(known, 2**bits) >= high:
            return False
        known, bits, digits = known << 64 | int(draws.words(1)[0]), bits + 64, digits + 40


def _exp_bounds(gamma: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Return bounds of exp(-gamma). `Decimal.exp` is right to half a unit in the last digit."""
    ends = []
    for rounding, sign in ((decimal.ROUND_CEILING, -1), (decimal.ROUND_FLOOR, 1)):
        with decimal.localcontext(
            # No traps: Python's defaults are those of `decimal.DefaultContext`, which a user may have changed.
            decimal.Context(
                prec=digits, rounding=rounding, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, clamp=0, traps=[]
            )
        ):
            value = (-(Decimal(gamma.numerator) / Decimal(gamma.denominator))).exp()
            ends.append(Fraction(value) * (1 + sign * Fraction(10) ** (1 - digits)))
    return ends[0], ends[1]


EXACT = ("system", "opendp")

Sampler = Callable[[np.ndarray], np.ndarray]
Measurement = Callable[[list[int]], list[int]]

_AT_ONCE = {"system": 1 << 16, "opendp": 1 << 10}  # elements: more than 10 milliseconds
_enabling = Lock()


def with_discrete_gaussian(
    values: np.ndarray, scale: float, source: str = "system", threads: int | None = None
) -> np.ndarray:
    """Return int64 integers (1-D) plus independent noise. `threads`: None for as many as processors may be used."""
    size = _AT_ONCE[source]
    pieces = [values[start : start + size] for start in range(0, values.size, size)]
    workers = min(len(pieces), processors() if threads is None else threads)

    def noised(own: list[np.ndarray]) -> list[np.ndarray]:
        plus_noise = sampler(source, scale)  # one for each thread
        return list(map(plus_noise, own))

    if workers <= 1:
        found = [noised(pieces)] if pieces else []
    else:
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(noised, (pieces[first::workers] for first in range(workers))))
    every = np.empty(values.size, np.int64)
    for first, arrays in enumerate(found):
        for turn, array in enumerate(arrays):
            start = (first + turn * len(found)) * size
            every[start : start + array.size] = array
    return every


def sampler(source: str, scale: float) -> Sampler:
    """Return what adds the noise to an array of int64 integers."""
    if source == "system":
        return partial(with_noise, scale=scale, draws=SystemDraws())
    measurement = gaussian(scale)
    return lambda piece: np.array(measurement(piece.tolist()), np.int64)


def gaussian(scale: float) -> Measurement:
    """Return OpenDP's measurement, which adds the noise to a list of int64 integers."""
    with needed_for("noise by rng='opendp'"):
        # Not `opendp.prelude`, which imports scikit-learn and Polars if they are installed.
        from opendp.domains import atom_domain, vector_domain
        from opendp.measurements import make_gaussian
        from opendp.metrics import l2_distance
        from opendp.mod import GLOBAL_FEATURES, disable_features, enable_features
    with _enabling:
        off = "contrib" not in GLOBAL_FEATURES
        enable_features("contrib")
        try:
            return make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=scale)
        finally:
            if off:
                disable_features("contrib")


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """If an import inside the block fails for want of a package, say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0].replace("_", "-")
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed. "
            "To install: pip install '.[private]' in a clone of gradclip",
            name=error.name,
        ) from error
