"""What an update must look like: the names, dtypes and shapes of the arrays of a template."""

from collections.abc import Sequence
from typing import NamedTuple

from gradclip._src.updates.files import stored
from gradclip._src.updates.files.stored import Stored
from gradclip._src.updates.verdict import named, shown
from gradclip._src.words import listed


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
