"""What is promised of a sum over examples: how far one of them can move it, and what noise that asks for."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from gradclip.per_example.quantities import as_number, check_name
from gradclip.per_example.rounding import rounded_up
from gradclip.typing import Relation, Unit

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
UNITS = ("example", "group")


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
    unit: Unit
    relation: Relation
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
