"""Judge arrays in memory and in files alike: read piece by piece once, and again only where rounding could matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from gradclip._src.backends.host.backend import HOST
from gradclip._src.checks import exactly, verdict
from gradclip._src.checks.measured import Reading, counts, left_out, measured
from gradclip._src.checks.template import Template, differences
from gradclip._src.checks.verdict import Measurement, UpdateCheck
from gradclip._src.core import accumulators
from gradclip._src.core.coefficient import exceeds, undecided
from gradclip._src.core.formats import is_complex_name
from gradclip._src.core.norms import Order
from gradclip._src.files import stored
from gradclip._src.files.stored import Stored
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.norm_at_most import known_threshold
from gradclip._src.words import listed
from gradclip.typing import Threshold

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
        f"norms of order {order.p:g} are not compared exactly piece by piece. Pass ord as an integer from 1 to "
        f"{accumulators.LARGEST_ORDER:g}, inf or -inf."
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
        return *exactly.above(arrays, order, limit), []
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
