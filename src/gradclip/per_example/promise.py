"""`Sensitivity`: how far one example can move a sum, and how much noise that needs."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from gradclip.arguments import check_flag
from gradclip.per_example.quantities import as_number, check_name
from gradclip.per_example.rounding import rounded_up
from gradclip.typing import Relation, Unit

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
UNITS = ("example", "group")


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

    Raises:
        ValueError: a number out of range, or an unknown name.
        TypeError: a value that is not a number. NumPy scalars are accepted and become Python numbers.

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
    keeps_places: bool = False

    def __post_init__(self) -> None:
        for name in ("bound", "rounding", *([] if self.denominator is None else ["denominator"])):
            object.__setattr__(self, name, as_number(name, getattr(self, name)))
        if not self.bound >= 0:
            raise ValueError(f"bound must be a distance, 0 or more, got {self.bound!r}.")
        if self.rounding < 0:
            raise ValueError(f"rounding must be 0 or more, or NaN if it is unknown, got {self.rounding!r}.")
        if self.denominator is not None and not 0 < self.denominator < math.inf:
            raise ValueError(f"denominator must be None or a positive number, got {self.denominator!r}.")
        check_name("unit", self.unit, UNITS)
        check_name("relation", self.relation, RELATIONS)
        object.__setattr__(self, "keeps_places", check_flag("keeps_places", self.keeps_places))

    @property
    def total(self) -> float:
        """The bound plus the rounding, rounded up: the largest distance in floating point.

        Raises ValueError if the rounding is unknown or the bound is infinite.
        """
        if math.isinf(self.bound + self.rounding):
            raise ValueError(
                f"one {self.unit} can move this sum without limit: {self.note or 'max_norm must be finite'}."
            )
        if math.isnan(self.rounding):
            raise ValueError(
                "the rounding of this sensitivity is unknown: it grows with the number of examples in a sum. Pass "
                "batch_size=, the most examples summed at once. To leave the rounding out, use "
                "dataclasses.replace(sensitivity, rounding=0.0)."
            )
        return rounded_up(Fraction(self.bound) + Fraction(self.rounding))

    def noise_std(self, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise to add to the result: noise_multiplier * total, rounded up.

        `noise_multiplier` is the ratio of noise to sensitivity that accountants of the Gaussian mechanism use.

        Raises ValueError for a negative or infinite multiplier, for noise beyond float64's range, and when `total`
        does. Raises TypeError for a multiplier that is not a number.

        >>> Sensitivity(1.0, "example", "replace_one").noise_std(noise_multiplier=1.1)
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

    def without_limit(self, reason: str) -> "Sensitivity":
        """Return a copy with an infinite bound, and the reason for it in `note`."""
        return replace(self, bound=math.inf, rounding=0.0, note=reason)
