"""How far one example can move a sum of clipped gradients: what the noise of private training is scaled to.

The bound. Let B be the norm that one unit (an example, or a group of them that is clipped as one) cannot exceed: C, or
the root of the sum of the C_k**2 of several thresholds. Taking a unit away moves the exact sum by at most B; replacing
it by another, by 2B; putting zeros in its place, by B. All rules have the same B: `"clip"` scales a norm N by
min(1, C / N), `"normalize"` by C / N, `"automatic"` by C / (N + gamma). A sum that is divided by a constant moves
by that much less. The constant must be one: how many examples there are is itself private.

The rounding. Let there be n units of K elements each, u the unit roundoff of the format that sums are taken in and v
that of the format they are handed out in. Write g(k, u) = k*u / (1 - k*u), so that a product of k factors, each
1 + d with |d| <= u, differs from 1 by at most g(k, u) (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., lemma 3.1).

1. Let p_i be what unit i adds, ||p_i|| <= B. In each coordinate, whatever the order, a term takes part in at
   most n - 1 additions, so the computed sum is the sum of the terms p_ij, each times such a product (a fused
   multiply and add rounds no more often). Rounding the result, adding k microbatches (k - 1 additions), and
   dividing by a constant (or multiplying by its rounded inverse; the constant itself may be rounded, too) makes r more
   factors with v for u. Adding m such sums afterwards, in any order, makes m - 1 more: with v again, or, where they are
   first rounded to a format of roundoff w, m with w. So each coordinate is off by at most e * sum_i |p_ij|,
   e = (1 + g(n - 1, u)) * (1 + g(r, v)) * (1 + g(m, w)) - 1, and by the triangle inequality the vector by
   e * ||sum_i |p_i||| <= e * n * B, n counting the units of all m. The two sums compared are off by twice that.
2. What the other units add can change as well: where one example makes a reduction choose another order, or another
   scale, the computed norms of all others may change in their last bits. A computed norm of K elements differs from
   the exact one by a factor with at most (K + 9) / 2 + 3 rounding errors, and the coefficient adds 8 more, and the
   16 by which it is lowered where it is not 1; so two coefficients of one example differ by at most
   s = 2 * (K + 16) * u, relatively, and all p_i together by s * n * B. Devices that add in float32 add in pairs; for
   them K is twice the number of its binary digits. (The kernels' sums of half types err by more, but give a row of a
   batch the same bits whatever the others hold.)
3. Numbers below the normal range may be flushed to zero: at most the smallest normal number for each of the
   operations of step 1 in each of K coordinates, doubled for what follows them.

`rounding` is the sum of the three, over the constant. Sums of integers on a grid have no rounding; they need
coefficients that depend on their own example alone, bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from gradclip.arguments import check_flag, check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.grid import check_grid, check_threshold_of_grid, grid_for
from gradclip.policy import Nonfinite
from gradclip.quantities import as_count, as_divisor, as_format, as_number, check_name, shown
from gradclip.rounding import Summation, root_up, rounded_up
from gradclip.tree import flatten

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
RULES = ("clip", "normalize", "automatic")
UNITS = ("example", "group")
ASSUMED_ELEMENTS = 2**26


@dataclass(frozen=True)
class Sensitivity:
    """The largest L2 distance between what is returned with one unit of data and without it.

    Args:
        bound: that distance in exact arithmetic, in units of what is returned: of the sum, or of the sum over
            `denominator` (already divided).
        unit: what is one unit of data: "example", or "group", which is clipped as one.
        relation: what may happen to one unit: "add_or_remove_one", "replace_one" by another, or "zero_out", which
            puts zeros in its place.
        denominator: the constant that the sum has been divided by; None is a sum.
        rounding: what the rounding of floating-point sums may add to the distance: 0 for sums of integers, NaN where
            it is not known, because no batch size was given.
        note: which batches it speaks of, such as "batches padded to 256 examples"; where the bound is infinite, why.

    Raises:
        ValueError: numbers out of range, or a name that is none of those above.
        TypeError: what is no number. NumPy's scalars are, and become Python's.

    >>> mean = Sensitivity(bound=0.5, unit="example", relation="add_or_remove_one", denominator=4.0)
    >>> print(mean)
    sum over examples / 4, add or remove one example: at most 0.5
    >>> mean.noise_std(noise_multiplier=3.0)
    1.5
    """

    bound: float
    unit: str
    relation: str
    denominator: float | None = None
    rounding: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("bound", "rounding", *([] if self.denominator is None else ["denominator"])):
            object.__setattr__(self, name, as_number(name, getattr(self, name)))
        if not self.bound >= 0:
            raise ValueError(f"bound must be a distance, 0 or more, got {self.bound!r}.")
        if self.rounding < 0:
            raise ValueError(f"rounding must be 0 or more, or NaN where it is not known, got {self.rounding!r}.")
        if self.denominator is not None and not 0 < self.denominator < math.inf:
            raise ValueError(f"denominator must be None or a positive number, got {self.denominator!r}.")
        check_name("unit", self.unit, UNITS)
        check_name("relation", self.relation, RELATIONS)

    @property
    def total(self) -> float:
        """The bound with the rounding, rounded up: what one unit can make in the arithmetic the machine does.

        Raises ValueError where the rounding is not known, or nothing bounds the distance.
        """
        if math.isinf(self.bound + self.rounding):
            raise ValueError(
                f"one {self.unit} can move this sum without limit: {self.note or 'max_norm must be finite'}."
            )
        if math.isnan(self.rounding):
            raise ValueError(
                "how much rounding adds to this sensitivity is not known: it grows with the number of examples in a "
                "sum. Pass batch_size=, the most examples that are summed at once; or leave the rounding out with "
                "dataclasses.replace(sensitivity, rounding=0.0)."
            )
        return rounded_up(Fraction(self.bound) + Fraction(self.rounding))

    def noise_std(self, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise to add to what is returned: noise_multiplier * total, rounded up.

        `noise_multiplier` is the noise in units of the sensitivity, as accountants of Gaussian mechanisms take it.

        Raises ValueError for a negative or infinite multiplier, for noise beyond float64's range, and as `total` does;
        TypeError for what is no number.

        >>> Sensitivity(1.0, "example", "replace_one").noise_std(noise_multiplier=1.1)
        1.1
        """
        multiplier = as_number("noise_multiplier", noise_multiplier)
        if not 0 <= multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number, 0 or more, got {noise_multiplier!r}.")
        std = rounded_up(Fraction(multiplier) * Fraction(self.total))
        if math.isinf(std):
            raise ValueError(
                f"noise of {multiplier:g} times {self.total:g} is beyond float64's range; lower max_norm or "
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

    def without_limit(self, reason: str) -> "Sensitivity":
        """Return the same with an infinite bound, and the reason for it."""
        return replace(self, bound=math.inf, rounding=0.0, note=reason)


@ordinary_arithmetic
def clipped_sum_sensitivity(
    max_norm: Any,
    relation: str = "add_or_remove_one",
    *,
    unit: str = "example",
    rule: str = "clip",
    per_layer: bool = False,
    nonfinite: str = "skip",
    normalize_by: float = 1.0,
    to_unit: bool = False,
    batch_size: int | None = None,
    sum_dtype: Any = "float32",
    grid: int | None = None,
    summed_in: Any = "float64",
    partial_sums: int = 1,
    elements: int | None = None,
    microbatches: int = 1,
    partial_sums_in: Any = None,
) -> Sensitivity:
    """Return the sensitivity of a sum of clipped gradients; the module's docstring proves it.

    Args:
        max_norm: the threshold C of each unit, or a prefix tree of thresholds, each for what lies below it.
        relation: "add_or_remove_one", "replace_one" or "zero_out", as in `Sensitivity`.
        unit: "example", or "group".
        rule: "clip", "normalize" or "automatic": none exceeds C.
        per_layer: each layer is clipped to its share of C; the squares of the shares add up to C**2.
        nonfinite: the policy for NaN and infinities. Under "propagate" one of them spoils the whole sum, and under
            "raise" the error tells of it: the bound is infinite.
        normalize_by: the constant that the sum is divided by.
        to_unit: each threshold is 1, whatever `max_norm`: gradients are divided by it as well.
        batch_size: the most units in the whole sum, over all partial sums; without it the rounding is not known, and
            `noise_std` raises a ValueError that asks for it.
        sum_dtype: what the sum is handed out in: "float32" or "float64".
        grid: how many steps of an integer grid `max_norm` has: sums of integers, which do not round. The bound is that
            of the integers times max_norm / grid, also by layer; in steps it is grid / max_norm times as much. For
            several thresholds it is that of each of the sums times its own threshold / grid.
        summed_in: what the device adds up in: "float64", or "float32" where it has no other.
        partial_sums: how many sums, of which each is rounded to `sum_dtype`, are added up afterwards at most: of
            devices, of virtual batches, of both (their product). The order does not matter.
        elements: the most elements that one unit's gradient has; None assumes 2**26.
        microbatches: how many microbatches each of these sums is added up from, in `sum_dtype`, at most.
        partial_sums_in: what partial sums are rounded to and added up in, where that is not `sum_dtype`: "float32",
            "float64", "float16" or "bfloat16", as for a compressed reduction.

    Returns:
        A `Sensitivity`, whose bound and rounding are rounded up.

    Raises:
        ValueError: a threshold below 0 or NaN, a name that does not exist, a count below 1 or above 2**63 - 1, a
            `normalize_by` that `sum_dtype` cannot divide by, a sum that may overflow, and what `per_example_clip`
            refuses: a grid above 2**52 or too coarse, `to_unit` with a grid.
        TypeError: a threshold that is no number.

    Rules: Bu et al. 2023, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger".

    >>> print(clipped_sum_sensitivity(1.0, batch_size=256))
    sum over examples, add or remove one example: at most 1.0 (+ 3.4e-05 rounding)
    >>> clipped_sum_sensitivity({"w": 3.0, "b": 4.0}, "replace_one", normalize_by=2.0, grid=2**20).bound
    5.0
    """
    check_name("relation", relation, RELATIONS)
    per_layer, to_unit = check_flag("per_layer", per_layer), check_flag("to_unit", to_unit)
    check_name("rule", rule, RULES)
    policy = Nonfinite.named(nonfinite)
    counts = {
        "batch_size": batch_size,
        "elements": elements,
        "partial_sums": partial_sums,
        "microbatches": microbatches,
    }
    known = {name: None if count is None else as_count(name, count) for name, count in counts.items()}
    sum_format, device = as_format("sum_dtype", sum_dtype), as_format("summed_in", summed_in)
    added_in = None if partial_sums_in is None else as_format("partial_sums_in", partial_sums_in, narrow=True)
    divisor = as_divisor("normalize_by", normalize_by, sum_format)
    thresholds = _thresholds(max_norm)
    _check_together(thresholds, grid, known, to_unit=to_unit, per_layer=per_layer, alone=_is_number(max_norm))
    denominator = None if divisor == 1 else divisor
    if policy.tells:
        return Sensitivity(math.inf, unit, relation, denominator, note=policy.tells)
    if math.inf in thresholds and not to_unit:
        return Sensitivity(math.inf, unit, relation, denominator)
    one = root_up(sum((Fraction(1.0 if to_unit else c) ** 2 for c in thresholds), Fraction(0)))
    bound = math.inf
    if one < math.inf:
        bound = rounded_up((2 if relation == "replace_one" else 1) * Fraction(one) / Fraction(divisor))
    if math.isinf(bound):
        raise ValueError(f"a sensitivity beyond float64's range: lower max_norm, got {shown(max_norm)}.")
    summation = Summation(
        device,
        sum_format,
        None if added_in is sum_format and grid is None else added_in,
        known["microbatches"] or 1,
        known["partial_sums"] or 1,
        known["elements"] or ASSUMED_ELEMENTS,
        divisor,
        grid is not None,
    )
    return Sensitivity(bound, unit, relation, denominator, summation.bound(one, known["batch_size"]))


def _thresholds(max_norm: Any) -> list[float]:
    """Return the thresholds in a tree, checked: numbers of frameworks become Python's."""
    found = []
    for threshold in flatten(max_norm).leaves:
        as_number("max_norm", threshold)
        found.append(check_threshold(float(check_threshold(threshold))))
    if not found:
        raise ValueError("max_norm holds no thresholds; pass a number, or a tree of numbers.")
    return found


def _is_number(max_norm: Any) -> bool:
    leaves = flatten(max_norm).leaves
    return len(leaves) == 1 and leaves[0] is max_norm


def _check_together(
    thresholds: Sequence[float],
    grid: Any,
    counts: Mapping[str, int | None],
    *,
    to_unit: bool,
    per_layer: bool,
    alone: bool,
) -> None:
    """Raise a ValueError for settings that `per_example_clip` refuses together."""
    if to_unit and per_layer:
        raise ValueError(
            "to_unit with per_layer depends on the number of layers; pass a tree with a threshold for each."
        )
    if per_layer and not alone:
        raise ValueError("per_layer=True takes one number for max_norm; a tree of thresholds says it all itself.")
    if check_grid(None if grid is None else as_count("grid", grid)) is None:
        return
    if to_unit:
        raise ValueError("to_unit=True goes without a grid; divide the sum by max_norm.")
    for threshold in thresholds:
        check_threshold_of_grid(threshold)
    grid_for(int(grid), counts["elements"] or 1, counts["batch_size"] or 1)
