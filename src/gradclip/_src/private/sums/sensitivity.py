"""How far one example can move a sum of clipped gradients, with the proof. Private training scales its noise to it.

The bound. A unit is one example, or a group of examples that are clipped together. Let B be the largest norm one unit
can have after clipping: C, or the root of the sum of the C_k**2 of several thresholds. Removing a unit moves the exact
sum by at most B. Putting zeros in its place moves it by at most B, replacing it by a different unit by at most 2B. All
rules have the same B: `"clip"` scales a norm N by min(1, C / N), `"normalize"` by C / N, `"automatic"` by
C / (N + gamma). Dividing the sum by a constant divides the bound by it. The divisor must be a constant: the number of
examples is itself private. What rounding adds is in `private/sums/rounding.py`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

from gradclip._src.annotations import Policy, Relation, RuleName, Thresholds, Unit, WideDtype
from gradclip._src.core.formats import Format
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_flag, check_threshold
from gradclip._src.private.sums.layout import SumLayout, as_layout
from gradclip._src.private.sums.rounding import ASSUMED_ELEMENTS, FactoredGradients, Summation, root_up, rounded_up
from gradclip._src.private.sums.settings import (
    PerExampleSettings,
    as_count,
    as_divisor,
    as_format,
    as_number,
    check_name,
    check_threshold_of_grid,
    grid_for,
)
from gradclip._src.public import public
from gradclip._src.tree import flatten
from gradclip._src.words import advised, shown, with_advice

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
UNITS = ("example", "group")


@public
@advised
@dataclass(frozen=True)
class Sensitivity:
    """The largest L2 distance that one unit of data can move a result.

    Args:
        bound: that distance in exact arithmetic, in the units of the result, after any division by `denominator`. For
            sums on a grid, in units of the integers times max_norm / grid.
        unit: one unit of data: "example", or "group" if whole groups are clipped together.
        relation: what happens to one unit. "add_or_remove_one", "replace_one" (by a different unit) or "zero_out"
            (zeros take its place).
        denominator: the constant that the sum was divided by; None if it was not divided.
        rounding: how much floating-point rounding may add to the distance. 0 for sums of integers, NaN if unknown
            because no batch size was given.
        note: which batches it holds for, such as "batches padded to 256 examples". If the bound is infinite, why.
        keeps_places: it holds only for two batches in which every unit they share has the same place. A unit that is
            removed leaves a gap: its place stays empty, by `mask=`.
        batch_size: the most units in a sum that it holds for; None if it does not depend on that.
        in_steps: for sums on a grid, the distance of the integers themselves, rounded up; None for sums that are not
            integers. It is `grid` for one threshold, grid * sqrt(k) for k of them, twice that for "replace_one".

    Raises:
        ValueError: a number out of range, or an unknown name. TypeError: a value that is not a number.

    >>> mean = Sensitivity(
    ...     0.5, "example", relation="add_or_remove_one", denominator=4.0
    ... )
    >>> print(mean)
    sum over examples / 4, add or remove one example: at most 0.5
    >>> mean.noise_std(noise_multiplier=3.0)
    1.5
    """

    bound: float
    unit: Unit
    _: KW_ONLY
    relation: Relation
    denominator: float | None = None
    rounding: float = 0.0
    note: str = ""
    keeps_places: bool = False
    batch_size: int | None = None
    in_steps: float | None = None

    def __post_init__(self) -> None:
        optional = [name for name in ("denominator", "in_steps") if getattr(self, name) is not None]
        for name in ("bound", "rounding", *optional):
            object.__setattr__(self, name, as_number(name, getattr(self, name)))
        if not self.bound >= 0:
            raise ValueError(f"bound must be a distance, 0 or more, got {self.bound!r}.")
        if self.rounding < 0:
            raise ValueError(f"rounding must be 0 or more, or NaN if it is unknown, got {self.rounding!r}.")
        if wrong := [name for name in optional if not 0 < getattr(self, name) < math.inf]:
            raise ValueError(f"{wrong[0]} must be None or a positive number, got {getattr(self, wrong[0])!r}.")
        check_name("unit", self.unit, UNITS)
        check_name("relation", self.relation, RELATIONS)
        object.__setattr__(self, "keeps_places", check_flag("keeps_places", self.keeps_places))
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", as_count("batch_size", self.batch_size))

    @property
    def total(self) -> float:
        """The bound plus the rounding, rounded up: the largest distance in floating point.

        Raises ValueError if the rounding is unknown or the bound is infinite.
        """
        if math.isinf(self.bound + self.rounding):
            why = self.note or "max_norm must be finite"
            raise ValueError(f"the sensitivity of this sum is infinite, so no noise can hide one {self.unit}: {why}.")
        if math.isnan(self.rounding):
            raise ValueError(
                "the rounding of this sensitivity is unknown: it grows with the number of examples in a sum. Pass "
                "batch_size=, the most examples summed at once. To leave the rounding out, use "
                "dataclasses.replace(sensitivity, rounding=0.0)."
            )
        return rounded_up(Fraction(self.bound) + Fraction(self.rounding))

    @with_advice
    def noise_std(self, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise to add to the result: noise_multiplier * total, rounded up.

        `noise_multiplier` is the ratio of noise to sensitivity that accountants of the Gaussian mechanism use.

        Raises ValueError for a negative or infinite multiplier, for noise beyond float64's range, and when `total`
        does. Raises TypeError for a multiplier that is not a number.

        >>> one = Sensitivity(1.0, "example", relation="replace_one")
        >>> one.noise_std(noise_multiplier=1.1)
        1.1
        """
        multiplier = as_number("noise_multiplier", noise_multiplier)
        if not 0 <= multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number, 0 or more, got {noise_multiplier!r}.")
        std = rounded_up(Fraction(multiplier) * Fraction(self.total))
        if math.isinf(std):
            raise ValueError(
                f"noise of {multiplier:g} times {self.total:g} is beyond float64's range. Lower max_norm or "
                "noise_multiplier."
            )
        return std

    def __str__(self) -> str:
        divided = "" if self.denominator is None else f" / {self.denominator:g}"
        change = self.relation.removesuffix("_one").replace("_", " ")
        extra = f" (+ {self.rounding:.2g} rounding)" if self.rounding else ""
        if math.isnan(self.rounding):
            extra = " (+ rounding, unknown without batch_size)"
        note = f"; {self.note}" if self.note else ""
        return f"sum over {self.unit}s{divided}, {change} one {self.unit}: at most {self.bound}{extra}{note}"


@public
@with_subnormals
def clipped_sum_sensitivity(
    max_norm: Thresholds,
    relation: Relation = "add_or_remove_one",
    *,
    unit: Unit = "example",
    rule: RuleName = "clip",
    per_layer: bool = False,
    nonfinite: Policy = "drop",
    normalize_by: float = 1.0,
    to_unit: bool = False,
    batch_size: int | None = None,
    sum_dtype: WideDtype = "float32",
    grid: int | None = None,
    layout: SumLayout | None = None,
) -> Sensitivity:
    """Return the sensitivity of a sum of clipped gradients, a proven bound with its rounding.

    Args:
        max_norm: the threshold C of each unit. Or a prefix tree of thresholds: each clips the leaves below it together.
        relation: "add_or_remove_one", "replace_one" or "zero_out", as in `Sensitivity`.
        unit: "example" or "group".
        rule: "clip", "normalize" or "automatic". All have the same bound.
        per_layer: whether each layer is clipped to its share of C. The squares of the shares add up to C**2.
        nonfinite: the policy for NaN and infinities. With "propagate" and "raise" the bound is infinite: one bad
            example spoils the whole sum, or raises an error that reveals it.
        normalize_by: the constant that the sum is divided by.
        to_unit: whether gradients are also divided by `max_norm`, so each threshold is 1.
        batch_size: the most units in the whole sum, over all partial sums. Without it the rounding is unknown, and
            `noise_std` raises a ValueError.
        sum_dtype: the dtype in which the sum is returned, "float32" or "float64".
        grid: the number of integer steps in `max_norm`, if sums are on a grid. They are integers and do not round. The
            bound is for the integers times max_norm / grid, with `per_layer` as well. In steps it is grid / max_norm
            times as much. With several thresholds, it is for all sums together, each times its own threshold / grid.
        layout: how the sum is added up, if it has several parts, if the device has no float64, or if a unit has more
            than 2**26 elements.

    Returns:
        A `Sensitivity`. Its bound and rounding are proven, and rounded up.

    Raises:
        ValueError: a negative or NaN threshold, an unknown name, a count below 1 or above 2**63 - 1, a `normalize_by`
            that `sum_dtype` cannot divide by, a sum that may overflow, a grid that is above 2**52 or too coarse,
            `to_unit` with a grid or `per_layer`.
        TypeError: a threshold that is not a number.

    Rules: Bu et al. 2023, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger".

    >>> print(clipped_sum_sensitivity(1.0, batch_size=256))
    sum over examples, add or remove one example: at most 1.0 (+ 3.4e-05 rounding)
    >>> clipped_sum_sensitivity({"w": 3.0, "b": 4.0}, "replace_one", grid=8).bound
    10.0
    """
    per_layer, to_unit = check_flag("per_layer", per_layer), check_flag("to_unit", to_unit)
    sum_format = as_format("sum_dtype", sum_dtype)
    _thresholds(max_norm)
    if to_unit and per_layer:
        raise ValueError(
            "the sensitivity of to_unit with per_layer depends on the layers. Pass a tree with one threshold for each."
        )
    if to_unit and grid is not None:
        raise ValueError("to_unit=True does not work with a grid. Divide the sum by max_norm instead.")
    settings = PerExampleSettings(
        max_norm,
        per_layer=per_layer,
        nonfinite=nonfinite,
        rule=rule,
        grid=None if grid is None else as_count("grid", grid),
        to_unit=to_unit,
    )
    return sensitivity_of(
        settings,
        relation,
        unit=unit,
        normalize_by=normalize_by,
        batch_size=batch_size,
        sum_format=sum_format,
        layout=as_layout(layout),
    )


def sensitivity_of(
    settings: PerExampleSettings,
    relation: Relation = "add_or_remove_one",
    *,
    sum_format: Format,
    unit: Unit = "example",
    normalize_by: float = 1.0,
    batch_size: int | None = None,
    layout: SumLayout | None = None,
    factors: FactoredGradients | None = None,
) -> Sensitivity:
    """Return the sensitivity under these settings.

    `factors` is as in `Summation`. The other arguments are those of `clipped_sum_sensitivity`.
    """
    check_name("relation", relation, RELATIONS)
    layout = SumLayout() if layout is None else layout
    count = None if batch_size is None else as_count("batch_size", batch_size)
    named = layout.partial_sums_in
    added_in = None if named is None else as_format("partial_sums_in", named, narrow=True)
    divisor = as_divisor("normalize_by", normalize_by, sum_format)
    thresholds = _thresholds(settings.max_norm)
    if settings.grid is not None:
        list(map(check_threshold_of_grid, thresholds))
        grid_for(settings.grid, layout.elements or 1, count or 1)
    denominator = None if divisor == 1 else divisor
    if settings.policy.tells:
        return Sensitivity(math.inf, unit, relation=relation, denominator=denominator, note=settings.policy.tells)
    if math.inf in thresholds and not settings.to_unit:
        return Sensitivity(math.inf, unit, relation=relation, denominator=denominator)
    times = 1 + (relation == "replace_one")
    one = root_up(sum((Fraction(1.0 if settings.to_unit else c) ** 2 for c in thresholds), Fraction(0)))
    bound = math.inf
    if one < math.inf:
        bound = rounded_up(times * Fraction(one) / Fraction(divisor))
    if math.isinf(bound):
        raise ValueError(f"the sensitivity is beyond float64's range. Lower max_norm, got {shown(settings.max_norm)}.")
    on_grid = settings.grid is not None
    summation = Summation(
        as_format("summed_in", layout.summed_in),
        sum_format,
        None if added_in is sum_format and not on_grid else added_in,
        layout.microbatches or 1,
        layout.partial_sums,
        layout.elements or ASSUMED_ELEMENTS,
        divisor,
        on_grid,
        factors,
    )
    rounding = summation.bound(one, count)
    integers = settings.grid is not None and rounding == 0 and denominator is None
    steps = root_up(Fraction(len(thresholds) * (times * (settings.grid or 1)) ** 2)) if integers else None
    return Sensitivity(
        bound,
        unit,
        relation=relation,
        denominator=denominator,
        rounding=rounding,
        batch_size=count,
        in_steps=steps,
    )


def _thresholds(max_norm: Thresholds) -> list[float]:
    """Check the thresholds of a tree and return them as Python numbers."""
    found = []
    for threshold in flatten(max_norm).leaves:
        as_number("max_norm", threshold)
        found.append(check_threshold(float(check_threshold(threshold))))
    if not found:
        raise ValueError("max_norm holds no thresholds. Pass a number or a tree of numbers.")
    return found
