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

from __future__ import annotations

import math
from fractions import Fraction

from gradclip.arguments import check_flag, check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends.formats import Format
from gradclip.per_example.grid import check_threshold_of_grid, grid_for
from gradclip.per_example.promise import RELATIONS, Sensitivity
from gradclip.per_example.quantities import as_count, as_divisor, as_format, as_number, check_name, shown
from gradclip.per_example.rounding import ASSUMED_ELEMENTS, Summation, root_up, rounded_up
from gradclip.per_example.settings import PerExampleSettings
from gradclip.tree import flatten
from gradclip.typing import Policy, Relation, RuleName, SumDtype, Thresholds, Unit, WideDtype


@ordinary_arithmetic
def clipped_sum_sensitivity(
    max_norm: Thresholds,
    relation: Relation = "add_or_remove_one",
    *,
    unit: Unit = "example",
    rule: RuleName = "clip",
    per_layer: bool = False,
    nonfinite: Policy = "skip",
    normalize_by: float = 1.0,
    to_unit: bool = False,
    batch_size: int | None = None,
    sum_dtype: WideDtype = "float32",
    grid: int | None = None,
    summed_in: WideDtype = "float64",
    partial_sums: int = 1,
    elements: int | None = None,
    microbatches: int = 1,
    partial_sums_in: SumDtype | None = None,
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
    per_layer, to_unit = check_flag("per_layer", per_layer), check_flag("to_unit", to_unit)
    sum_format = as_format("sum_dtype", sum_dtype)
    _thresholds(max_norm)
    if to_unit and per_layer:
        raise ValueError(
            "to_unit with per_layer depends on the number of layers; pass a tree with a threshold for each."
        )
    if to_unit and grid is not None:
        raise ValueError("to_unit=True goes without a grid; divide the sum by max_norm.")
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
        summed_in=summed_in,
        partial_sums=partial_sums,
        elements=elements,
        microbatches=microbatches,
        partial_sums_in=partial_sums_in,
    )


def sensitivity_of(
    settings: PerExampleSettings,
    relation: Relation,
    *,
    unit: Unit,
    normalize_by: float,
    batch_size: int | None,
    sum_format: Format,
    summed_in: WideDtype,
    partial_sums: int,
    elements: int | None,
    microbatches: int,
    partial_sums_in: SumDtype | None,
) -> Sensitivity:
    """Return the sensitivity of a sum by these settings; the other arguments are as in `clipped_sum_sensitivity`."""
    check_name("relation", relation, RELATIONS)
    counts = {
        "batch_size": batch_size,
        "elements": elements,
        "partial_sums": partial_sums,
        "microbatches": microbatches,
    }
    known = {name: None if count is None else as_count(name, count) for name, count in counts.items()}
    device = as_format("summed_in", summed_in)
    added_in = None if partial_sums_in is None else as_format("partial_sums_in", partial_sums_in, narrow=True)
    divisor = as_divisor("normalize_by", normalize_by, sum_format)
    thresholds = _thresholds(settings.max_norm)
    if settings.grid is not None:
        for threshold in thresholds:
            check_threshold_of_grid(threshold)
        grid_for(settings.grid, known["elements"] or 1, known["batch_size"] or 1)
    denominator = None if divisor == 1 else divisor
    if settings.policy.tells:
        return Sensitivity(math.inf, unit, relation, denominator, note=settings.policy.tells)
    if math.inf in thresholds and not settings.to_unit:
        return Sensitivity(math.inf, unit, relation, denominator)
    one = root_up(sum((Fraction(1.0 if settings.to_unit else c) ** 2 for c in thresholds), Fraction(0)))
    bound = math.inf
    if one < math.inf:
        bound = rounded_up((2 if relation == "replace_one" else 1) * Fraction(one) / Fraction(divisor))
    if math.isinf(bound):
        raise ValueError(f"a sensitivity beyond float64's range: lower max_norm, got {shown(settings.max_norm)}.")
    on_grid = settings.grid is not None
    summation = Summation(
        device,
        sum_format,
        None if added_in is sum_format and not on_grid else added_in,
        known["microbatches"] or 1,
        known["partial_sums"] or 1,
        known["elements"] or ASSUMED_ELEMENTS,
        divisor,
        on_grid,
    )
    return Sensitivity(bound, unit, relation, denominator, summation.bound(one, known["batch_size"]))


def _thresholds(max_norm: Thresholds) -> list[float]:
    """Return the thresholds in a tree, checked: numbers of frameworks become Python's."""
    found = []
    for threshold in flatten(max_norm).leaves:
        as_number("max_norm", threshold)
        found.append(check_threshold(float(check_threshold(threshold))))
    if not found:
        raise ValueError("max_norm holds no thresholds; pass a number, or a tree of numbers.")
    return found
