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
   multiply and add rounds no more often). Rounding the result, or adding up m parts that have been rounded, and then
   dividing it by a constant (or multiplying it by the rounded inverse) makes r more factors with v for u. So
   each coordinate is off by at most e * sum_i |p_ij|, e = (1 + g(n - 1, u)) * (1 + g(r, v)) - 1, and by the triangle
   inequality the vector by e * ||sum_i |p_i||| <= e * n * B. The two sums compared are together off by twice that.
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
import numbers
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from gradclip.backends.formats import FLOAT32, FLOAT64, Format, bare_name
from gradclip.coefficient import check_threshold
from gradclip.tree import flatten

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
RULES = ("clip", "normalize", "automatic")
UNITS = ("example", "group")
_TELLING = {
    "propagate": "under nonfinite='propagate' one NaN makes all of it NaN; pass nonfinite='skip' or 'zero'",
    "raise": "under nonfinite='raise' an error tells that one holds NaN; pass nonfinite='skip' or 'zero'",
}
_FORMATS = {"float32": FLOAT32, "float64": FLOAT64}


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
        if not self.bound >= 0:
            raise ValueError(f"bound must be a distance, 0 or more, got {self.bound!r}.")
        if self.rounding < 0:
            raise ValueError(f"rounding must be 0 or more, or NaN where it is not known, got {self.rounding!r}.")
        if self.denominator is not None and not 0 < self.denominator < math.inf:
            raise ValueError(f"denominator must be None or a positive number, got {self.denominator!r}.")
        _check_name("unit", self.unit, UNITS)
        _check_name("relation", self.relation, RELATIONS)

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

        Raises ValueError for a negative or infinite multiplier, and as `total` does.

        >>> Sensitivity(1.0, "example", "replace_one").noise_std(noise_multiplier=1.1)
        1.1
        """
        if not 0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number, 0 or more, got {noise_multiplier!r}.")
        return rounded_up(Fraction(noise_multiplier) * Fraction(self.total))

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
    elements: int = 2**26,
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
        batch_size: the most units that are summed at once; without it the rounding is not known, and
            `noise_std` raises a ValueError that asks for it.
        sum_dtype: what the sum is handed out in: "float32" or "float64".
        grid: how many steps of an integer grid `max_norm` has: sums of integers, which do not round. The bound is that
            of the integers times max_norm / grid; in steps it is grid / max_norm times as much.
        summed_in: what the device adds up in: "float64", or "float32" where it has no other.
        partial_sums: into how many microbatches, of which each is rounded to `sum_dtype`, a sum is split at most.
        elements: the most elements that one unit's gradient has.

    Returns:
        A `Sensitivity`, whose bound and rounding are rounded up.

    Raises:
        ValueError: a threshold below 0 or NaN, a name that does not exist, a count below 1, or a sum that may overflow.
        TypeError: a threshold that is no number.

    Rules: Bu et al. 2023, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger".

    >>> print(clipped_sum_sensitivity(1.0, batch_size=256))
    sum over examples, add or remove one example: at most 1.0 (+ 3.4e-05 rounding)
    >>> clipped_sum_sensitivity({"w": 3.0, "b": 4.0}, "replace_one", normalize_by=2.0, grid=2**20).bound
    5.0
    """
    _check_name("relation", relation, RELATIONS)
    _check_name("rule", rule, RULES)
    _check_name("nonfinite", nonfinite, (*_TELLING, "zero", "skip"))
    counts = {"batch_size": batch_size, "grid": grid, "partial_sums": partial_sums, "elements": elements}
    for name, count in counts.items():
        _check_count(name, count)
    if not 0 < normalize_by < math.inf:
        raise ValueError(f"normalize_by must be a positive number, the constant to divide by, got {normalize_by!r}.")
    thresholds = [check_threshold(float(check_threshold(c))) for c in flatten(max_norm).leaves]
    if not thresholds:
        raise ValueError("max_norm holds no thresholds; pass a number, or a tree of numbers.")
    if to_unit and per_layer:
        raise ValueError(
            "to_unit with per_layer depends on the number of layers; pass a tree with a threshold for each."
        )
    denominator = None if normalize_by == 1 else float(normalize_by)
    formats = _format("sum_dtype", sum_dtype), _format("summed_in", summed_in)
    if nonfinite in _TELLING:
        return Sensitivity(math.inf, unit, relation, denominator, note=_TELLING[nonfinite])
    if math.inf in thresholds and not to_unit:
        return Sensitivity(math.inf, unit, relation, denominator)
    one = root_up(sum((Fraction(1.0 if to_unit else c) ** 2 for c in thresholds), Fraction(0)))
    moved = (2 if relation == "replace_one" else 1) * Fraction(one) / Fraction(normalize_by)
    rounding = _Rounding(*formats, grid is not None, partial_sums, elements, normalize_by).bound(one, batch_size)
    return Sensitivity(rounded_up(moved), unit, relation, denominator, rounding)


@dataclass(frozen=True)
class _Rounding:
    """How a sum is computed, as far as it decides what rounding adds."""

    sum_format: Format
    summed_in: Format
    on_grid: bool
    partial_sums: int
    elements: int
    normalize_by: float

    @property
    def roundings(self) -> int:
        """How often a sum is rounded to the format it is handed out in."""
        division = 0 if math.frexp(self.normalize_by)[0] == 0.5 else 2
        narrowed = self.sum_format is not self.summed_in or self.partial_sums > 1
        return division + (self.partial_sums if narrowed and not self.on_grid else 0)

    def bound(self, one: float, count: int | None) -> float:
        """Return what rounding adds to the distance of sums of `count` units whose norms are at most `one`."""
        if self.on_grid and not self.roundings:
            return 0.0
        if count is None:
            return math.nan
        if count * one >= 2.0 ** (self.sum_format.max_exponent - 1):
            raise ValueError(
                f"a sum of {count} units of norm {one:g} can overflow {self.sum_format.name}; lower max_norm or "
                "batch_size, or sum in float64."
            )
        additions = Fraction(0) if self.on_grid else _growth(count - 1, self.summed_in)
        apart = 2 * ((1 + additions) * (1 + _growth(self.roundings, self.sum_format)) - 1)
        if not self.on_grid:
            in_norm = self.elements if self.summed_in is FLOAT64 else 2 * self.elements.bit_length()
            apart += 2 * (in_norm + 16) * Fraction(self.summed_in.roundoff)
        each = count * Fraction(self.summed_in.tiny) + self.roundings * Fraction(self.sum_format.tiny)
        flushed = 4 * (math.isqrt(self.elements) + 1) * each
        moved = apart * count * Fraction(one) / Fraction(self.normalize_by)
        return rounded_up(moved + flushed / Fraction(min(self.normalize_by, 1.0)))


def _check_name(what: str, name: Any, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, got {name!r}.")


def _check_count(name: str, count: Any) -> None:
    whole = isinstance(count, numbers.Integral) and not isinstance(count, bool)
    if count is not None and not (whole and count >= 1):
        raise ValueError(f"{name} must be a whole number, 1 or more, got {count!r}.")


def _format(name: str, dtype: Any) -> Format:
    """Return the format of a dtype that is given by its name, as a dtype, or as NumPy's or JAX's type."""
    found = bare_name(getattr(dtype, "__name__", dtype))
    if found not in _FORMATS:
        raise ValueError(f"{name} must be float32 or float64, got {dtype!r}.")
    return _FORMATS[found]


def _growth(count: int, element: Format) -> Fraction:
    """Return by how much a product of `count` rounding factors can differ from 1."""
    errors = count * Fraction(element.roundoff)
    if 2 * errors > 1:
        raise ValueError(f"nothing can be said of sums of {count} terms in {element.name}; sum fewer, or in float64.")
    return errors / (1 - errors)


def rounded_up(exact: Fraction) -> float:
    """Return the smallest float64 that is not below an exact number."""
    try:
        near = float(exact)
    except OverflowError:
        return math.inf
    return near if math.isinf(near) or near >= exact else math.nextafter(near, math.inf)


def root_up(exact: Fraction) -> float:
    """Return the smallest float64 that is not below the square root of an exact number."""
    # The integer root of a number scaled to 128 bits or more: no float64 lies between it and the exact root.
    shift = max(0, 128 - exact.numerator.bit_length() + exact.denominator.bit_length())
    shift += shift % 2
    scaled = -((-exact.numerator << shift) // exact.denominator)
    root = math.isqrt(scaled)
    return rounded_up(Fraction(root if root * root == scaled else root + 1, 1 << shift // 2))
