"""Operations on host arrays without the kernels, chunk by chunk, so that each chunk stays in cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src.backends.host.arrays import (
    HostArray,
    as_columns,
    as_float,
    blocks_of,
    is_finite,
    multiplied,
    narrowed,
    rows_first,
    wide_chunks,
    widened,
)
from gradclip._src.backends.sums import raised
from gradclip._src.core.formats import FLOAT64, Format, format_of, is_complex, product_format
from gradclip._src.core.layouts import Scope

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient, Factors


def power_sum_of(x: HostArray, p: float, scope: Scope, divisor: np.ndarray | np.generic | float | None) -> Any:
    """Return the sum of (|x| / divisor)**p for each norm of the scope."""

    def of_wide(wide: np.ndarray, divisor: np.ndarray | np.generic | float | None) -> Any:
        scaled = wide if divisor is None else wide / divisor
        powers: Any = raised(np, scaled, p)
        return powers.sum(axis=-1)

    return _reduced(x, of_wide, np.add, scope, divisor, separate=p == 2)


def largest_of(x: HostArray, scope: Scope) -> Any:
    """Return the largest magnitude for each norm of the scope."""
    return _reduced(x, lambda wide, _: np.abs(wide).max(axis=-1), np.maximum, scope)


def smallest_of(x: HostArray, scope: Scope) -> Any:
    """Return the smallest magnitude for each norm of the scope, or NaN if an element is non-finite."""

    def of_wide(wide: np.ndarray, _: object) -> Any:
        magnitude = np.abs(wide)
        finite = np.isfinite(magnitude.max(axis=-1))
        # The minimum would ignore an infinity.
        return np.where(finite, magnitude.min(axis=-1), np.nan)

    return _reduced(x, of_wide, np.minimum, scope)


def _reduced(
    x: HostArray,
    of_wide: Callable[[np.ndarray, Any], Any],
    merge: np.ufunc,
    scope: Scope,
    divisor: np.ndarray | np.generic | float | None = None,
    *,
    separate: bool = False,
) -> Any:
    """Reduce chunk by chunk. Complex numbers count as magnitudes, or with `separate` as two real parts."""
    # |x|**2 is the sum of the squared parts, so no square root is needed.
    if separate and is_complex(x):
        reduced = [_reduced(p, of_wide, merge, scope, divisor) for p in x.parts()]
        return merge(*reduced)
    if scope.whole:
        return merge.reduce([of_wide(wide, divisor) for wide in wide_chunks(x)])
    own = scope.own_axes(len(x.shape))
    columns = None if x.counted is not None else as_columns(x.data, own)
    if columns is not None:  # read in memory order
        by = None if divisor is None else np.reshape(divisor, (-1, 1))
        reduced = [of_wide(widened(columns[block], x.dtype).T, by) for block in blocks_of(columns)]
        return merge.reduce(reduced).reshape(scope.norms_shape(x.shape))
    result = np.empty(scope.norms_shape(x.shape))
    flat, divisors = result.reshape(-1), None if divisor is None else np.reshape(divisor, -1)
    for block, rows in x.rows(own):
        mine = None if divisors is None else divisors[block, None]
        flat[block] = of_wide(widened(rows, x.dtype), mine)
    return result


def count_nonfinite(x: HostArray) -> tuple[int, int]:
    """Return the numbers of NaN and of infinite elements."""
    nans = infinities = 0
    for chunk in x.chunks():
        # Nearly all chunks are finite and need only this one check.
        if not is_finite(chunk, x.dtype).all():
            infinite = np.isinf(as_float(chunk, x.dtype))
            infinities += int(infinite.sum())
            nans += int((np.isnan(as_float(chunk, x.dtype)) & ~infinite).sum())
    return nans, infinities


def scale_chunks(x: HostArray, coefficient: Coefficient) -> None:
    """Scale an array in place."""
    if coefficient.blank:
        # Assigned, not multiplied by zero: 0 * NaN is NaN.
        x.data[...] = 0
        return
    for part in x.parts():
        target, (source, factors) = format_of(part), _products_of(part, coefficient)
        for chunk in part.chunks("readwrite"):
            product = multiplied(chunk, part.dtype, source, factors.first, factors.second)
            chunk[...] = narrowed(product, target)


def scale_rows(x: HostArray, coefficient: Coefficient, scope: Scope) -> None:
    """Scale each row of an array in place by its own coefficient. A row contains the elements that share a norm."""
    own, some_blank = scope.own_axes(len(x.shape)), np.any(coefficient.blank)
    for part in x.parts():
        target, (source, factors) = format_of(part), _products_of(part, coefficient)
        second = 1.0 if factors.second is None else factors.second  # a product with 1 is exact
        values = factors.first, second, coefficient.keep, coefficient.blank
        columns = as_columns(part.data, own)
        data = rows_first(part.data, own) if columns is None else columns
        if columns is None:
            of_rows = [_over_rows(value, data, own) for value in values]
        else:
            of_rows = [np.broadcast_to(np.reshape(value, (1, -1)), data.shape) for value in values]
        for block in blocks_of(data):
            here, (first, second, keep, blank) = data[block], [value[block] for value in of_rows]
            scaled = narrowed(multiplied(here, part.dtype, source, first, second), target)
            result = np.where(blank, np.zeros((), here.dtype), scaled) if some_blank else scaled
            # Rows that are kept are not written, so they stay bit-identical.
            np.copyto(here, result, where=~keep)


def _products_of(part: HostArray, coefficient: Coefficient) -> tuple[Format, Factors]:
    """Return the format for multiplying a real array (the same as in the kernels) and the factors."""
    source = product_format(part, FLOAT64)
    return source, coefficient.wide if source is FLOAT64 else coefficient.narrow


def weighted_sum(x: HostArray, coefficient: Coefficient) -> np.ndarray:
    """Return the float64 sum over examples, each times its own coefficient."""
    weights = coefficient.weights(np)
    sums = []
    for part in x.parts():
        total = np.zeros(math.prod(x.shape[1:]))
        for product in _products(part, weights, coefficient.blank):
            total += product.sum(axis=0)
        sums.append(total.reshape(x.shape[1:]))
    return sums[0] if len(sums) == 1 else sums[0] + 1j * sums[1]


def rounded_sum(x: HostArray, coefficient: Coefficient) -> np.ndarray:
    """Return the sum over examples, each times its own coefficient and rounded to integers."""
    total = np.zeros(math.prod(x.shape[1:]), np.int64)
    for product in _products(x, coefficient.wide, coefficient.blank):
        # Integer sums are exact, so they do not depend on the order.
        total += np.rint(product).astype(np.int64).sum(axis=0)
    return total.reshape(x.shape[1:])


def clamp_chunks(x: HostArray, bound: float) -> None:
    """Clamp an array in place. Writes only chunks that change."""
    limit = format_of(x).toward_zero(bound)
    for chunk in x.chunks("readwrite"):
        wide = widened(chunk, x.dtype)
        # NaN does not compare as above the limit, so it stays.
        if (np.abs(wide) > limit).any():
            chunk[...] = narrowed(np.clip(wide, -limit, limit), format_of(x))


def _over_rows(value: np.ndarray | np.generic | float, data: np.ndarray, own: tuple[int, ...]) -> np.ndarray:
    """Shape one value per row, or one for all rows, so that it broadcasts to the rows."""
    lengths = data.shape[: max(1, len(own))]
    return np.broadcast_to(value, lengths).reshape(*lengths, *[1] * (data.ndim - len(lengths)))


def _products(x: HostArray, factors: Factors, blank: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of whole examples in float64, times their factors, with zeros for blank examples."""
    for block, rows in x.rows():
        wide = widened(rows, x.dtype) * factors.first[block, None]
        if factors.second is not None:
            wide *= factors.second[block, None]
        wide[blank[block]] = 0.0  # after the product, which can be NaN for a non-finite example
        yield wide
