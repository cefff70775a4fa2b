"""Sums over arrays: their terms, the order of the additions, and bounds on the rounding error.

How a bound follows from the order stands in `core.norms`. Orders that lose the most stay within it: proofs/orders.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Protocol, TypeVar

from gradclip._src import native
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.layouts import Scope
from gradclip._src.core.norms import Order, relative_error
from gradclip._src.core.values import Array


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


S = TypeVar("S", bound=_Shaped)

# Terms below 2**-1022 may underflow. 2**40 such terms lose at most 2**-982 in total. That is less than half an ulp of a
# sum above this value.
ENOUGH = 2.0**-900

_ROUNDOFF = FLOAT64.roundoff


def kernels_sum_error(count: int, only_halves: bool, p: float) -> float:
    """Return a bound on the relative error when the kernels sum `count` powers of elements."""
    # The kernels add hierarchically, so each term goes through few additions, however many terms there are.
    error = min(count, native.ADDITIONS) * _ROUNDOFF
    # Only squares are added in float32, and only if no wider leaf needs float64 precision.
    return error + native.HALF_SQUARES_ERROR if p == 2 and only_halves else error


def examples_sum_error(count: int) -> float:
    """Return a bound on the relative error of the sums of `count` squares in `add_examples`."""
    # Nothing is added in float32 here: private sums keep float64 precision even for half types.
    return min(count, native.ADDITIONS) * _ROUNDOFF


# Both cached: there are few different sizes, and this takes longer than measuring a small array.
@lru_cache(maxsize=256)
def kernels_norm_error(count: int, p: float, only_halves: bool) -> float:
    """Return a bound on the relative error of the norm of order p of `count` elements whose powers the kernels sum."""
    return relative_error(Order(p), kernels_sum_error(count, only_halves, p), FLOAT64, exact=False)


@lru_cache(maxsize=256)
def examples_norm_error(count: int, p: float) -> float:
    """Return the same for an example or a unit, whose powers are all summed in float64."""
    return relative_error(Order(p), examples_sum_error(count), FLOAT64, exact=False)


def filled(arrays: Sequence[S], scope: Scope) -> list[S]:
    """Return the arrays without those that have no elements to measure."""
    # NumPy and PyTorch raise an error for the maximum of no elements.
    return [x for x in arrays if 0 not in map(x.shape.__getitem__, scope.shared_axes(len(x.shape)))]


def over_examples(value: Array, like: Array) -> Array:
    """Reshape a vector with one value per example so that it broadcasts to `like`."""
    return value[(slice(None), *[None] * (like.ndim - 1))]


def raised(xp: ModuleType, wide: Array, p: float) -> Array:
    """Return |wide|**p."""
    # A product is rounded only once. The error of a library's power function is less certain, and is part of the norm's
    # error bound.
    if p == 2:
        return wide * wide
    magnitude = xp.abs(wide)
    return magnitude if p == 1 else magnitude**p


def halving_sum(xp: ModuleType, terms: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum over `axes`, by adding the second half to the first half until one term is left.

    Each term goes through ceil(log2(n)) additions. The error bound relies on that.
    """
    kept = [n for axis, n in enumerate(terms.shape) if axis not in axes]
    order = (*axes, *(axis for axis in range(terms.ndim) if axis not in axes))
    count = math.prod([terms.shape[axis] for axis in axes])
    rest = xp.reshape(xp.permute_dims(terms, order), (count, *kept))
    # A framework's own sum guarantees no order, so its error could not be bounded this tightly.
    while rest.shape[0] > 1:
        half = rest.shape[0] // 2
        paired = rest[:half] + rest[half : 2 * half]
        rest = xp.concat([paired, rest[2 * half :]]) if rest.shape[0] % 2 else paired
    return xp.sum(rest, axis=0)  # a single term, or none
