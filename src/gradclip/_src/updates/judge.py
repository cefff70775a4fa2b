"""Judge arrays in memory and in files alike: read piece by piece once, and again only where rounding could matter.

Let S be the sum of |x|**p, N its root and C the bound. Then N - C is (S - C**p) divided by the sum of N**k * C**(p-1-k)
over k from 0 to p-1. The numerator is exact and the terms below it are positive, so N needs few digits. The largest and
the smallest magnitude of complex numbers are roots of exact squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain

import numpy as np

from gradclip._src.annotations import Threshold
from gradclip._src.backends.host import exact
from gradclip._src.backends.host.arrays import HostArray, viewed_arrays, wide_chunks
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.host.exact_powers import PowerSum, excess_of_powers
from gradclip._src.core import accumulators
from gradclip._src.core.coefficient import exceeds, undecided
from gradclip._src.core.formats import is_complex_name
from gradclip._src.core.norms import Order
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.norm_at_most import known_threshold
from gradclip._src.updates import verdict
from gradclip._src.updates.files import stored
from gradclip._src.updates.files.stored import Stored
from gradclip._src.updates.measured import Gauge, Reading, counts, left_out, measured
from gradclip._src.updates.verdict import Measurement, Template, UpdateCheck, differences
from gradclip._src.words import listed

_DIGITS = 120  # binary digits of a root
_PAIRS_ENOUGH = Fraction(1, 2**17)
"""Relative to the bound: with a larger difference, the error of 2**-70 of sums in pairs is below the last bit."""


class ChangedError(ValueError):
    """Arrays that were finite at the first look hold NaN or infinity at the second."""


def above(arrays: Sequence[Stored], order: Order, max_norm: Fraction) -> tuple[float, float]:
    """Return the norm of finite arrays, and by how much it exceeds a bound: 0.0 exactly if it does not.

    Both are rounded once from numbers with about 100 bits; `inf` if they are beyond float64's range.
    """
    if order.p > 2 and not order.extreme:
        found = _above_in_pairs(arrays, int(order.p), max_norm)
        if found is not None:
            return found
    power = 1 if order.p == 1 else 2 if order.extreme else int(order.p)
    return _norm_and_excess(_power_sum(arrays, order), power, max_norm)


def _norm_and_excess(total: Fraction, power: int, max_norm: Fraction) -> tuple[float, float]:
    norm, beyond = root(total, power), total - max_norm**power
    if beyond <= 0:
        return as_float(norm), 0.0
    slope = sum((norm**k * max_norm ** (power - 1 - k) for k in range(power)), Fraction(0))
    return as_float(norm), max(as_float(beyond / slope), math.ulp(0.0))


def root(number: Fraction, power: int) -> Fraction:
    """Return the root of a number >= 0: exact for power 1, else with a relative error below 2**-119."""
    if power == 1 or not number:
        return number
    size = number.numerator.bit_length() - number.denominator.bit_length()
    exponent = size // power  # the root is near 2**exponent
    scaled = number * Fraction(2) ** (power * (_DIGITS - exponent))
    return Fraction(_integer_root(int(scaled), power)) * Fraction(2) ** (exponent - _DIGITS)


def as_float(number: Fraction) -> float:
    """Return the nearest float, `inf` beyond the range."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _integer_root(number: int, power: int) -> int:
    """Return the largest integer whose power is at most `number` (Newton's method, from above)."""
    if power == 2:
        return math.isqrt(number)
    guess = 1 << -(-number.bit_length() // power)
    while True:
        better = ((power - 1) * guess + number // guess ** (power - 1)) // power
        if better >= guess:
            return guess
        guess = better


def _power_sum(arrays: Sequence[Stored], order: Order) -> Fraction:
    """Return the exact sum of powers; for `inf` and `-inf` the exact square of the largest or smallest magnitude."""
    if order.extreme:
        squares = (exact.extreme_square(piece, order.p) for piece in _pieces(arrays, order))
        return (max if order.p > 0 else min)(squares, default=Fraction(0))
    if order.p > 2:
        powers = PowerSum(int(order.p))
        powers.add(_wide_chunks(arrays, order))
        return powers.total()
    total = Fraction(0)
    for piece in _pieces(arrays, order):
        of_piece = exact.power_sum(HOST, viewed_arrays([piece]), order.p, patient=True)
        assert isinstance(of_piece, Fraction)
        total += of_piece
    return total


def _above_in_pairs(arrays: Sequence[Stored], power: int, max_norm: Fraction) -> tuple[float, float] | None:
    """Return the same from sums in pairs of numbers; None if their error may matter."""
    beyond = excess_of_powers(_wide_chunks(arrays, Order(float(power))), power, max_norm)
    unit = Fraction(2) ** (math.frexp(max_norm)[1] * power)
    if beyond is None or not max_norm or abs(beyond) * unit <= max_norm**power * _PAIRS_ENOUGH:
        return None
    return _norm_and_excess(beyond * unit + max_norm**power, power, max_norm)


def _wide_chunks(arrays: Sequence[Stored], order: Order) -> Iterator[np.ndarray]:
    return chain.from_iterable(map(wide_chunks, _pieces(arrays, order)))


def _pieces(arrays: Sequence[Stored], order: Order) -> Iterator[HostArray]:
    """Yield the pieces with elements. Raises `ChangedError` if one is not finite: exact sums would not end."""
    gauge = Gauge(order)
    for x in arrays:
        for piece in x.pieces():
            if piece.size:
                if not math.isfinite(gauge.norm(piece).value):
                    raise ChangedError(f"{x.name} has changed while it was read. Read it again.")
                yield piece


_OF_VOID = (
    " (NumPy's files keep no names of dtypes that are not its own, such as bfloat16 and float8: save these as float32, "
    "or write safetensors)"
)


def checked_order(ord: object) -> Order:
    """Return an order whose norms can be judged. Raises ValueError for any other."""
    order = Order.parse(ord)
    if order.extreme or (order.p.is_integer() and order.p <= accumulators.LARGEST_ORDER):
        return order
    raise ValueError(
        f"ord must be an integer from 1 to {accumulators.LARGEST_ORDER:g}, inf or -inf: updates are compared with "
        f"max_norm in exact arithmetic, which knows no other norms. Got {order.p:g}."
    )


@with_subnormals
def judge(
    arrays: Sequence[Stored],
    max_norm: Threshold,
    order: Order,
    template: Template | None = None,
    *,
    faults: Sequence[str] = (),
    advice: str = "like=",
) -> UpdateCheck:
    """Judge an update.

    Args:
        arrays: all arrays of the update.
        max_norm: the bound, as `gradclip.norm_at_most` takes it.
        order: the order of the norm, as `checked_order` returns it.
        template: the arrays that the update must have; None accepts any that have numbers.
        faults: what is already known to be wrong with the update, in words.
        advice: how to pass a template, for the reason.

    """
    threshold, limit = known_threshold(max_norm)
    bound = threshold + 0.0, limit  # -0.0 is 0
    those = [x for x in arrays if counts(x.dtype)]
    found = [*faults, *_wrong(arrays, order, template)]
    found = found or _nothing(arrays)
    with HOST.precision():
        looked = measured(those, order)
        found += [*looked.unreadable, *([listed(looked.nonfinite, "; ")] if looked.nonfinite else [])]
        unmeasured = [*faults, *_unknown_kinds(arrays)]
        norm, excess, failed = _compared(those, order, looked, bound, measurable=not unmeasured)
    found += failed
    if excess > 0 and looked.finite:
        weights = verdict.heaviest([x.name for x in those], looked.shares, order.p)
        found.append(verdict.too_large(norm, bound[0], excess, weights))
    if found:
        return UpdateCheck(False, verdict.sentence(found), norm, excess)
    return UpdateCheck(True, verdict.sentence(_fine(arrays, norm, bound[0], template, advice)), norm, 0.0)


@with_subnormals
def measure(arrays: Sequence[Stored], order: Order) -> Measurement:
    """Measure arrays, of which those with integers do not count."""
    those = [x for x in arrays if counts(x.dtype)]
    with HOST.precision():
        looked = measured(those, order)
    integers = [x.name for x in arrays if left_out(x.dtype)]
    faults = [*_unknown_kinds(arrays), *looked.unreadable]
    norm = math.nan if faults else looked.value
    return Measurement(norm, len(those), looked.elements, integers, looked.nonfinite, faults)


def _compared(
    arrays: Sequence[Stored], order: Order, looked: Reading, bound: tuple[float, Fraction | None], *, measurable: bool
) -> tuple[float, float, list[str]]:
    """Return the norm, its excess, and what went wrong at the second look."""
    threshold, limit = bound
    if not measurable:
        return math.nan, math.nan, []
    if not looked.finite:
        return looked.value, looked.value, []
    if _undecidable(arrays, order):
        return looked.value, math.nan, []
    # A threshold that float64 cannot hold has been rounded down.
    if limit is None or not (undecided(looked.whole, threshold) or exceeds(looked.whole, threshold)):
        return looked.value, 0.0, []
    try:
        return *above(arrays, order, limit), []
    except Exception as error:  # a file that changes, or fails at the second look
        return math.nan, math.nan, [verdict.in_one_line(error)]


def _wrong(arrays: Sequence[Stored], order: Order, template: Template | None) -> list[str]:
    """Return what is wrong with an update before its numbers are read, in words."""
    found = differences(arrays, template) if template is not None else []
    found += _same_names(arrays)
    found += _unknown_kinds(arrays)
    undecidable = _undecidable(arrays, order)
    if undecidable:
        found.append(f"{verdict.named(undecidable)} is complex, and norms of order {order.p:g} cannot be decided")
    return found


def _undecidable(arrays: Sequence[Stored], order: Order) -> list[str]:
    """Return the names of complex arrays, if their norms of this order have no exact power sums."""
    return [x.name for x in arrays if is_complex_name(x.dtype)] if order.p != 2 and not order.extreme else []


def _same_names(arrays: Sequence[Stored]) -> list[str]:
    seen: set[str] = set()
    twice = sorted({x.name for x in arrays if x.name in seen or seen.add(x.name)})  # type: ignore[func-returns-value]
    return [f"several arrays are named {verdict.named(twice)}"] if twice else []


def _unknown_kinds(arrays: Sequence[Stored]) -> list[str]:
    others = [x for x in arrays if not (counts(x.dtype) or left_out(x.dtype))]
    kinds = [f"{verdict.shown(x.name)} has dtype {stored.shown(x.dtype)}" for x in others]
    advice = _OF_VOID if any(x.dtype in ("void8", "void16") for x in others) else ""
    return [f"{listed(kinds)}, which norms do not support{advice}"] if kinds else []


def _nothing(arrays: Sequence[Stored]) -> list[str]:
    """Say that an update holds no numbers that count, if it does not."""
    those = [x for x in arrays if counts(x.dtype)]
    if any(0 not in x.shape for x in those):
        return []
    if not arrays:
        return ["it holds no arrays"]
    if those:
        return ["its arrays of floating-point numbers have no elements"]
    return ["it holds no floating-point numbers, so there is nothing to measure"]


def _fine(arrays: Sequence[Stored], norm: float, threshold: float, template: Template | None, advice: str) -> list[str]:
    """Return what to say about an accepted update."""
    said = [verdict.within(norm, threshold)]
    if template is not None:
        return [f"{said[0]}, and {verdict.fitting(len(arrays))}"]
    integers = [x.name for x in arrays if left_out(x.dtype)]
    if integers:
        them = "do not count, so pass" if len(integers) > 1 else "does not count, so pass"
        said.append(
            f"{verdict.counted(len(integers), 'array')} of integers ({verdict.named(integers)}) {them} {advice} to "
            "have dtypes checked"
        )
    return said
