"""What an update must look like, the template; the verdict on an update, and the words for its reasons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradclip._src.public import public
from gradclip._src.updates.files import stored
from gradclip._src.updates.files.stored import Stored
from gradclip._src.words import listed, printable


class Slot(NamedTuple):
    """One array that a template asks for."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Template = Sequence[Slot]


def of_arrays(arrays: Sequence[Stored]) -> list[Slot]:
    """Return the template that these arrays are."""
    return [Slot(x.name, x.dtype, tuple(x.shape)) for x in arrays]


def differences(arrays: Sequence[Stored], template: Template) -> list[str]:
    """Return how arrays differ from a template, in words; nothing if they do not. The order does not matter."""
    asked = {slot.name: slot for slot in template}
    given = {x.name: x for x in arrays}
    missing = [name for name in asked if name not in given]
    unknown = [name for name in given if name not in asked]
    both = [(given[name], slot) for name, slot in asked.items() if name in given]
    shapes = [f"{shown(x.name)} has shape {x.shape}, not {s.shape}" for x, s in both if tuple(x.shape) != s.shape]
    dtypes = [
        f"{shown(x.name)} has dtype {stored.shown(x.dtype)}, not {s.dtype}" for x, s in both if x.dtype != s.dtype
    ]
    found = [_those(missing, "missing"), _those(unknown, "not in the template"), _of_lists(missing, unknown)]
    return [
        *filter(None, found),
        *([listed(shapes, "; ")] if shapes else []),
        *([listed(dtypes, "; ")] if dtypes else []),
    ]


def _of_lists(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """Say that one of both is a list and the other has names, if they differ by that; nothing if not."""
    if missing and len(missing) == len(unknown):
        places = [f"[{place}]" for place in range(len(missing))]
        if unknown == places:
            return "the update is a list and the template has names, so pass a list as the template, in the same order"
        if missing == places:
            return "the template is a list and the update has names, so pass a template with names"
    return ""


def _those(names: Sequence[str], what: str) -> str:
    if len(names) < 2:
        return f"{named(names)} is {what}" if names else ""
    return f"{len(names)} arrays are {what}: {named(names)}"


_LONGEST_NAME, _LONGEST_TEXT = 80, 300  # characters
_MOST_WEIGHTS = 3
_FIRST_WORDS = ("the ", "it ", "its ", "several ")


@public
@dataclass(frozen=True)
class UpdateCheck:
    """Whether an update is acceptable, and why. It is true if `ok` is.

    Attributes:
        ok: whether the update is acceptable.
        reason: one sentence: the norm of an accepted update, or everything that is wrong with a refused one.
        norm: the norm of all arrays of floating-point and complex numbers together. NaN if an element is NaN, or if
            something cannot be measured; otherwise `inf` if an element is infinite or the norm is beyond float64's
            range.
        excess: 0.0 if the norm is at most `max_norm`. Otherwise norm - `max_norm`, which is positive: computed from
            the exact norm, so that it is right where the difference of two floats would be 0. NaN if the norm is NaN.
    """

    ok: bool
    reason: str
    norm: float
    excess: float

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return f"{'accepted' if self.ok else 'REFUSED'}. {self.reason}"


def refusal(why: str) -> UpdateCheck:
    """Return the refusal of an update that could not be read."""
    return UpdateCheck(False, sentence([why]), math.nan, math.nan)


@dataclass(frozen=True)
class Measurement:
    """What arrays hold.

    Attributes:
        norm: their norm. NaN or infinite as the elements are; NaN also if there are faults.
        arrays: how many count.
        numbers: how many numbers these hold.
        integers: the names of the arrays that do not count.
        nonfinite: for each array with NaN or infinity, its name and how many.
        faults: what could not be measured, and why.

    """

    norm: float
    arrays: int = 0
    numbers: int = 0
    integers: Sequence[str] = ()
    nonfinite: Sequence[str] = ()
    faults: Sequence[str] = ()

    @classmethod
    def failed(cls, why: str) -> "Measurement":
        """Return the measurement of arrays that could not be read."""
        return cls(math.nan, faults=[why])

    def __str__(self) -> str:
        if self.faults:
            return sentence(["it cannot be measured", *self.faults])
        said = [
            f"the norm of {counted(self.arrays, 'array')} with {counted(self.numbers, 'number')} is {self.norm:.9g}"
        ]
        if self.nonfinite:
            said.append(listed(self.nonfinite, "; "))
        if self.integers:
            said.append(f"{counted(len(self.integers), 'array')} of integers: {named(self.integers)}")
        return sentence(said)


def sentence(parts: Sequence[str]) -> str:
    """Return one sentence with all parts."""
    text = "; ".join(parts)
    # The name of an array or of a file stays as it is.
    return f"{text[0].upper()}{text[1:]}." if text.startswith(_FIRST_WORDS) else f"{text}."


def shown(name: str) -> str:
    """Return the name of an array for a sentence: printable, and cut if it is long. A bare array has no name."""
    text = printable(name, _LONGEST_NAME)
    if not text:
        return "the array"
    return text if text.startswith(("[", ".")) else f"'{text}'"


def in_one_line(error: BaseException) -> str:
    """Return what an error says, in one printable line without its last full stop."""
    try:
        text = printable(" ".join(str(error).split())).rstrip(".")
    except Exception:  # an object of the update may say how it is printed
        text = ""
    return f"{text:.{_LONGEST_TEXT}}" or type(error).__name__


def counted(number: int, what: str) -> str:
    """Return a number of things: "1 array", "2 arrays"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def within(norm: float, max_norm: float) -> str:
    """Say that a norm is within its bound."""
    return f"the norm {norm:.9g} is at most {max_norm:.9g}"


def fitting(arrays: int) -> str:
    """Say that an update is like its template."""
    return f"the names, shapes and dtypes of its {counted(arrays, 'array')} are those of the template"


def too_large(norm: float, max_norm: float, excess: float, weights: str) -> str:
    """Say by how much a norm exceeds its bound, and where it comes from."""
    if math.isinf(norm):
        return f"the norm is beyond float64's range, and larger than {max_norm:.9g}{weights}"
    return f"the norm {norm:.9g} is larger than {max_norm:.9g} by {excess:.3g}{weights}"


def heaviest(names: Sequence[str], shares: Sequence[float], order: float) -> str:
    """Say which arrays contribute most to norm**order, given the share of each; nothing for a single array."""
    if len(names) < 2:
        return ""
    first = sorted(range(len(names)), key=lambda place: -shares[place])
    if math.isinf(order):
        return f"; the {'largest' if order > 0 else 'smallest'} magnitude is in {shown(names[first[0]])}"
    power = "the norm" if order == 1 else f"norm**{order:g}"
    most = [place for place in first[:_MOST_WEIGHTS] if shares[place]]
    parts = [f"{_percent(shares[place])} in {shown(names[place])}" for place in most]
    return f"; {power} lies {', '.join(parts)}" if parts else ""


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "less than 0.1%"
    return f"{100 * share:.3g}%"


def named(names: Sequence[str]) -> str:
    """Return a list of names of arrays."""
    return listed(list(map(shown, names)))
