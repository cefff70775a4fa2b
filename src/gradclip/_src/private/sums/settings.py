"""What sums of clipped examples are asked for, checked: how each example is clipped, numbers, dtypes, and exact grids.

Exact sums of many examples. Each example is rounded to integers, which add up exactly in any order.
A threshold is divided into `grid` steps. An example of D elements is scaled, in units of a step, to a norm of at most
grid - sqrt(D) / 2. Rounding each element to the nearest integer adds at most sqrt(D) / 2 to the norm, so it is at most
`grid`, exactly. The scaled elements are below 2**52, so float64 rounds them correctly. The sum of n examples needs
n * grid < 2**63.

A layer that is clipped to a share s of the threshold has the same steps. By the same argument, its norm is at most
s * grid steps. The squares of the shares add up to at most 1, exactly, so the norm of all layers is at most `grid`.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from gradclip._src.annotations import Policy, RuleName, Thresholds, WideDtype
from gradclip._src.backends.registry import framework_of
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, bare_name
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.rules import Target
from gradclip._src.passed.arguments import check_flag, check_threshold, is_single_threshold
from gradclip._src.private.sums.rounding import rounded_up
from gradclip._src.tree import flatten
from gradclip._src.words import shown, typed

_LARGEST_COUNT = 2**63 - 1
_WIDE = {"float32": FLOAT32, "float64": FLOAT64}
_HALF = {"float16": FLOAT16, "bfloat16": BFLOAT16}


def as_number(name: str, value: object) -> float:
    """Return a number, rounded up to float64.

    Raises TypeError for anything but a real number, ValueError for a number beyond float64's range.
    """
    given = _scalar(name, value)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} must be a number, got {typed(value)}.")
    if given != given or given in (math.inf, -math.inf):
        return float(given)
    number = rounded_up(Fraction(*given.as_integer_ratio()))  # type: ignore[attr-defined]
    if math.isinf(number):
        raise ValueError(f"{name} must be a number within float64's range, got {shown(value)}.")
    return number


def as_count(name: str, value: object) -> int:
    """Return a count as an int. Raises ValueError for anything but a whole number from 1 to 2**63 - 1."""
    given = _scalar(name, value)
    whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not (whole and 1 <= given <= _LARGEST_COUNT):
        limit = ", at most 2**63 - 1" if whole and given > 1 else ""
        raise ValueError(f"{name} must be a whole number, 1 or more{limit}, got {shown(value)}.")
    return int(given)


def as_number_of_examples(name: str, value: object) -> int:
    """Return a number of examples as an int. Raises TypeError if it is not a number, else as `as_count`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a whole number, 1 or more, got {typed(value)}.")
    return as_count(name, value)


def as_divisor(name: str, value: object, sums: Format) -> float:
    """Return a constant by which sums of a format can be divided.

    Raises TypeError for anything but a number. Raises ValueError if the number or its inverse is not a normal number
    of the format: compilers multiply by the inverse, and the result would be infinity or all zeros.
    """
    number = as_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, the constant that sums are divided by, got {value!r}.")
    if not sums.tiny <= number <= 1 / sums.tiny:
        wider = "" if sums.precision == 53 else " For sums in float64, pass sum_dtype='float64'."
        raise ValueError(
            f"{name} must be from {sums.tiny:g} to {1 / sums.tiny:g} to divide sums in {sums.name}, got "
            f"{value!r}.{wider}"
        )
    return number


def as_format(name: str, dtype: object, *, narrow: bool = False) -> Format:
    """Return the format of a dtype: its name, a framework's dtype, or a scalar type of NumPy or JAX.

    Raises ValueError unless it is float32 or float64, or with `narrow` also float16 or bfloat16.
    """
    known = _WIDE | _HALF if narrow else _WIDE
    found = bare_name(str(getattr(dtype, "__name__", dtype)))
    if found not in known:
        *first, last = known
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {shown(dtype)}.")
    return known[found]


def check_function(name: str, value: object) -> None:
    """Raise a TypeError for anything but a function."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {typed(value)}.")


def check_name(what: str, name: object, known: Sequence[str]) -> None:
    """Raise a ValueError for an unknown name."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, got {shown(name)}.")


def _scalar(name: str, value: object) -> Any:
    """Return the number in a framework's scalar array, and any other value unchanged.

    Raises TypeError for a traced array.
    """
    framework = framework_of(value)
    if framework is not None and framework.is_traced(value):
        raise TypeError(f"{name} must be a constant, got a traced array. Pass a Python number.")
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


RULES = ("clip", "normalize", "automatic")


@dataclass(frozen=True)
class PerExampleSettings:
    """How each example is clipped, and the dtype of the sums.

    The fields are the arguments of `gradclip.per_example_clip` and documented there. Flags, numbers and dtypes become
    Python booleans, numbers and names. `max_norm` is kept as it was passed: you may change an array later.

    Raises:
        TypeError, ValueError: a field out of range, or fields that exclude each other.

    >>> PerExampleSettings(1.0, rule="automatic", gamma=0.5).target
    Target(length=None, gamma=0.5, share=1.0, integers=False)

    """

    max_norm: Thresholds
    per_layer: bool = False
    uniform: bool = True
    nonfinite: Policy = "drop"
    rule: RuleName = "clip"
    gamma: float = 0.01
    sum_dtype: WideDtype | None = None
    grid: int | None = None
    to_unit: bool = False

    def __post_init__(self) -> None:
        for name in ("per_layer", "uniform", "to_unit"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        Nonfinite.named(self.nonfinite)
        check_name("rule", self.rule, RULES)
        object.__setattr__(self, "gamma", _checked_gamma(self.gamma))
        object.__setattr__(self, "sum_dtype", _checked_dtype(self.sum_dtype))
        if self.grid is not None:
            object.__setattr__(self, "grid", check_grid(self.grid))
        thresholds = self._thresholds()
        if self.to_unit and (self.per_layer or self.grid is not None):
            raise ValueError(
                "to_unit=True needs one norm per example, not per_layer or grid. Divide the sum by max_norm instead."
            )
        if self.grid is not None:
            for threshold in thresholds:
                check_threshold_of_grid(threshold)
            if self.sum_dtype is not None:
                raise ValueError("sums on a grid are int64. Leave out sum_dtype.")
            if self.policy.spoils:
                raise ValueError(
                    f"nonfinite={self.nonfinite!r} shows an example with NaN by a sum of NaN, but sums on a grid are "
                    "integers. Pass nonfinite='drop', 'zero' or 'raise', or leave out grid."
                )

    @property
    def policy(self) -> Nonfinite:
        """The policy for an example with NaN or infinities."""
        return Nonfinite.named(self.nonfinite)

    @property
    def target(self) -> Target:
        """What an example is scaled to. A grid replaces it by steps, which depend on the number of elements."""
        gamma = {"clip": None, "normalize": 0.0, "automatic": self.gamma}[self.rule]
        return Target(1.0 if self.to_unit else None, gamma)

    @property
    def dtype_of_sums(self) -> str | None:
        """The name of the dtype of the sums; None if it follows from the gradients."""
        if self.grid is not None:
            return "int64"
        return self.sum_dtype if isinstance(self.sum_dtype, str) else None

    @property
    def sum_format(self) -> Format:
        """The narrowest format of sums that are not on a grid."""
        return FLOAT64 if self.sum_dtype == "float64" else FLOAT32

    def _thresholds(self) -> list[Any]:
        if is_single_threshold(self.max_norm):
            return [check_threshold(self.max_norm)]
        if self.per_layer:
            raise ValueError(
                "per_layer=True needs one number as max_norm. To use a tree of thresholds, leave out per_layer."
            )
        thresholds = list(map(check_threshold, flatten(self.max_norm).leaves))
        if not thresholds:
            raise ValueError(
                f"max_norm holds no thresholds, got {shown(self.max_norm)}. Pass a number or a tree of numbers."
            )
        return thresholds


def _checked_gamma(gamma: object) -> float:
    try:
        number = float(gamma) if isinstance(gamma, numbers.Real) and not isinstance(gamma, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"gamma must be a finite number > 0, got {shown(gamma)}. To use none, pass rule='normalize'.")
    return number


def _checked_dtype(sum_dtype: object) -> str | None:
    if sum_dtype is None:
        return None
    name = bare_name(getattr(sum_dtype, "__name__", sum_dtype))
    if name not in ("float32", "float64"):
        raise ValueError(
            f"sum_dtype must be float32, float64 or None, got {shown(sum_dtype)}. Narrower sums lose examples."
        )
    return name


_LARGEST = 2**52


class Grid(NamedTuple):
    """How examples are scaled before rounding: to a norm of at most `steps`, which is `share` of their threshold."""

    steps: float
    share: float


def check_grid(grid: object) -> int:
    """Check a number of steps and return it as an int."""
    steps = int(grid) if isinstance(grid, numbers.Integral) and not isinstance(grid, bool) else 0
    if not 0 < steps <= _LARGEST:
        raise ValueError(f"grid must be the number of steps in max_norm, an integer from 1 to 2**52, got {grid!r}.")
    return steps


def smallest_grid(elements: int, share: float = 1.0) -> int:
    """Return the smallest grid with more than sqrt(elements) / 2 steps in this share of it."""
    return math.isqrt(int(elements / (2 * Fraction(share)) ** 2)) + 1


def grid_for(grid: int, elements: int, examples: int, share: float = 1.0) -> Grid:
    """Return how to scale examples of `elements` elements that are clipped to a share of the threshold.

    Raises ValueError if the grid is too coarse for them, or too fine for the sum to fit int64.
    """
    smallest = smallest_grid(elements, share)
    if grid < smallest:
        where = "" if share == 1 else f" of a layer that is clipped to {share:.3g} of max_norm"
        raise ValueError(
            f"grid={grid} is too coarse for {elements} elements{where}: each may be rounded by half a step. "
            f"The smallest grid that works is {smallest}; {1000 * smallest} costs at most 0.1% of max_norm."
        )
    if grid * examples >= 2**63:
        raise ValueError(
            f"the sum of {examples} examples on a grid of {grid} steps may overflow int64. The largest grid for "
            f"that many is {(2**63 - 1) // examples}."
        )
    root = math.nextafter(math.sqrt(elements), math.inf)
    most = grid if share == 1 else math.nextafter(grid * share, 0.0)
    steps = max(0.0, math.nextafter(most - root / 2, 0.0))
    return Grid(steps, steps / most)


def check_threshold_of_grid(max_norm: object) -> None:
    """Raise a ValueError for a threshold that cannot be divided into steps."""
    if isinstance(max_norm, float) and not 0 < max_norm < math.inf:
        raise ValueError(f"with a grid max_norm must be positive and finite, got {max_norm}. It is divided into steps.")
