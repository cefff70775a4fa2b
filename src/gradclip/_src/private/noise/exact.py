"""Exact noise: discrete Gaussian noise on integers, or on floats that are rounded to multiples of a step.

A sum on a grid. Let one unit move the vector of integers by at most `in_steps`. Noise of standard deviation
m * in_steps has noise multiplier m. That is rounded up to float64, so the multiplier is never smaller than m.

A sum of floats x, of D elements, which one unit moves by at most `total`. Each element is divided by a step s, clamped
to [-2**62, 2**62] and rounded to the nearest integer. s is a power of two, so the division is exact, up to numbers that
round to 0 or are clamped anyway. Clamping moves no two numbers further apart, and rounding moves each number by at most
1/2. So by the triangle inequality one unit moves the integers by at most total / s + sqrt(D). s is the largest power of
two with sqrt(D) * s <= total / 2**16: the noise grows by at most a factor of 1 + 2**-16. It depends on `total` and D
alone, which are public. NaN becomes 0 and infinities are clamped: raising an error would reveal them.

How far rounding moves a number is checked by machine: proofs/grid.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from gradclip._src.backends.registry import framework_of
from gradclip._src.core.formats import bare_name
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.private.noise.discrete import Sampler, with_discrete_gaussian
from gradclip._src.private.sums.rounding import root_up, rounded_up

FEWEST_STEPS = 64
_MOST_STEPS = 2**60
_LARGEST = 2.0**62
_FINENESS = 2**16


class Noise(NamedTuple):
    """Noise for floats that are rounded to multiples of 2**exponent: `scale` is its standard deviation in those."""

    exponent: int
    scale: float


def noise_on_integers(in_steps: float, noise_multiplier: float) -> float:
    """Return the standard deviation of noise for integers that one unit moves by at most `in_steps`, rounded up.

    Raises ValueError for fewer than 64 steps, for which the accounting of discrete noise is not proven.

    >>> noise_on_integers(1024.0, 1.5)
    1536.0
    """
    scale = rounded_up(Fraction(noise_multiplier) * Fraction(in_steps))
    if scale < FEWEST_STEPS:
        finer = -(-FEWEST_STEPS // Fraction(scale))
        raise ValueError(
            f"noise of {scale:g} steps is too coarse: the accounting needs {FEWEST_STEPS}. Pass a grid with at least "
            f"{finer} times as many steps."
        )
    return _in_range(scale)


def noise_on_floats(total: float, elements: int, noise_multiplier: float) -> Noise:
    """Return the step to which floats are rounded, and the noise in steps.

    Raises ValueError for fewer than 64 steps, and for a sensitivity near the ends of float64's range.

    >>> noise_on_floats(1.0, 4, 1.0)
    Noise(exponent=-17, scale=131074.0)
    """
    if not 2.0**-800 <= total <= 2.0**800:
        raise ValueError(
            f"the sensitivity must be from 2**-800 to 2**800 to round a sum to multiples of a step, got {total!r}. "
            "Scale the gradients, and max_norm with them."
        )
    root = Fraction(root_up(Fraction(elements)))
    exponent = _floor_log2(Fraction(total) / (_FINENESS * root))
    moved = Fraction(total) / Fraction(2) ** exponent + root
    scale = rounded_up(Fraction(noise_multiplier) * moved)
    if scale < FEWEST_STEPS:
        raise ValueError(
            f"noise_multiplier must be larger: with {noise_multiplier!r} the noise has {scale:g} steps, and the "
            f"accounting needs {FEWEST_STEPS}."
        )
    return Noise(exponent, _in_range(scale))


@with_subnormals
def to_integers(numbers: np.ndarray, exponent: int) -> np.ndarray:
    """Return floats divided by 2**exponent, from -1000 to 1000, clamped and rounded to int64; 0 for NaN."""
    with np.errstate(all="ignore"):
        scaled = np.multiply(numbers, math.ldexp(1.0, -exponent), dtype=np.float64)
        np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
        np.rint(scaled, out=scaled)
    np.copyto(scaled, 0.0, where=np.isnan(scaled))
    return scaled.astype(np.int64)


@with_subnormals
def to_floats(integers: np.ndarray, exponent: int, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Return integers times 2**exponent, from -1000 to 1000, rounded to float64 and then to the dtype."""
    with np.errstate(over="ignore"):  # as the sum itself may
        return (integers * math.ldexp(1.0, exponent)).astype(dtype, copy=False)


class AskedNoise(NamedTuple):
    """Noise for a sum that one unit moves by at most `total`, or on a grid by at most `in_steps` steps."""

    source: str
    multiplier: float
    total: float
    in_steps: float | None

    def of(self, leaves: Sequence[Any]) -> ExactNoise:
        """Return the noise for a sum of these arrays. Raises ValueError for fewer than 64 steps, and out of range."""
        if self.in_steps is not None:
            return ExactNoise(self.source, noise_on_integers(self.in_steps, self.multiplier))
        elements = sum(math.prod(leaf.shape) for leaf in leaves)
        exponent, scale = noise_on_floats(self.total, max(1, elements), self.multiplier)
        return ExactNoise(self.source, scale, exponent)


class ExactNoise(NamedTuple):
    """Noise for integers, or for floats if it has an exponent, from one of `EXACT` sources."""

    source: str
    scale: float
    exponent: int | None = None

    def added(self, leaves: Sequence[Any]) -> list[Any]:
        """Return arrays plus noise, in their own dtypes."""
        hosts: list[Any] = [framework_of(leaf) for leaf in leaves]
        given = [self._numbers(host, leaf) for host, leaf in zip(hosts, leaves, strict=True)]
        noised = with_discrete_gaussian(given, self.scale, self.source, around=self._around)
        with np.errstate(over="ignore"):  # float16 may overflow, as the sum itself may
            return [
                host.beside(host.like(leaf, bare_name(leaf.dtype), sums.reshape(leaf.shape)), leaf)
                for host, leaf, sums in zip(hosts, leaves, noised, strict=True)
            ]

    def _numbers(self, host: Any, leaf: Any) -> np.ndarray:
        """Return the numbers of a leaf as integers, in float32 or in float64."""
        as_it_is = self.exponent is None or bare_name(leaf.dtype) == "float32"
        return host.on_host(leaf).data.reshape(-1) if as_it_is else host.numbers([leaf])[0]

    def _around(self, sampler: Sampler) -> Sampler:
        exponent = self.exponent
        if exponent is None:
            return sampler
        return lambda piece: to_floats(sampler(to_integers(piece, exponent)), exponent, piece.dtype)


def _in_range(scale: float) -> float:
    if scale > _MOST_STEPS:
        raise ValueError(
            f"noise of {scale:g} steps would not fit int64. Lower noise_multiplier, or pass a coarser grid."
        )
    return scale


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1
