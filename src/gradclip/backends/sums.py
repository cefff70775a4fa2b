"""Sums over arrays: their terms, the order of their additions, and how large their errors can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

from gradclip import native
from gradclip.backends.formats import FLOAT64
from gradclip.backends.values import Array, Scope

if TYPE_CHECKING:
    from gradclip.backends.arrays import Arrays
    from gradclip.core.coefficient import Factors


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


S = TypeVar("S", bound=_Shaped)

# Terms below 2**-1022 may underflow. 2**40 of them lose at most 2**-982 together, which is less than half a unit in the
# last place of a sum above this.
ENOUGH = 2.0**-900

_ROUNDOFF = FLOAT64.roundoff


def kernels_sum_error(count: int, arrays: Arrays, p: float) -> float:
    """Return a bound on the relative error of a sum of `count` powers of the elements by the kernels."""
    # The kernels add in levels, so a term takes part in few additions, however many terms there are.
    error = min(count, native.ADDITIONS) * _ROUNDOFF
    # Squares alone are added in float32, and only where no wider leaf needs the precision of float64.
    return error + native.HALF_SQUARES_ERROR if p == 2 and arrays.only_halves else error


def examples_sum_error(count: int) -> float:
    """Return a bound on the relative error of the sums of squares in `add_examples`, each of `count` elements."""
    # Nothing is added in float32 here: private sums keep the precision of float64 for half types, too.
    return min(count, native.ADDITIONS) * _ROUNDOFF


def filled(arrays: Sequence[S], scope: Scope) -> list[S]:
    """Return the arrays without those that have no element for a norm."""
    # The largest of no elements is an error in NumPy and PyTorch.
    return [x for x in arrays if 0 not in map(x.shape.__getitem__, scope.shared_axes(len(x.shape)))]


def over_examples(value: Array, like: Array) -> Array:
    """Shape a vector with one value an example so that it broadcasts to `like`."""
    return value[(slice(None), *[None] * (like.ndim - 1))]


def raised(xp: ModuleType, wide: Array, p: float) -> Array:
    """Return |wide|**p."""
    # A product is rounded once. How far a library's power is off is less certain, and counts in the error of a norm.
    if p == 2:
        return wide * wide
    magnitude = xp.abs(wide)
    return magnitude if p == 1 else magnitude**p


def times(x: Array, factors: Factors, over: Callable[[Array, Array], Array]) -> Array:
    """Return an array times two factors, which `over` shapes so that they broadcast to it."""
    # One after the other: the product of both factors may lie below the range.
    product = x * over(factors.first, x)
    return product if factors.second is None else product * over(factors.second, x)


def halving_sum(xp: ModuleType, terms: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum over `axes`, adding the second half to the first until one term is left.

    Each term takes part in ceil(log2(n)) additions, which is what the error bound counts on.
    """
    kept = [n for axis, n in enumerate(terms.shape) if axis not in axes]
    order = (*axes, *(axis for axis in range(terms.ndim) if axis not in axes))
    count = math.prod([terms.shape[axis] for axis in axes])
    rest = xp.reshape(xp.permute_dims(terms, order), (count, *kept))
    # A framework's own sum promises no order, so nobody could prove how large its error is.
    while rest.shape[0] > 1:
        half = rest.shape[0] // 2
        paired = rest[:half] + rest[half : 2 * half]
        rest = xp.concat([paired, rest[2 * half :]]) if rest.shape[0] % 2 else paired
    return xp.sum(rest, axis=0)  # of one term, or of none
