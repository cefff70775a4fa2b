"""Checks of the arguments of `check_sensitivity` and of what the tested function returns."""

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gradclip._src.core.formats import SUPPORTED, bare_name
from gradclip._src.per_example.quantities import as_count, as_number
from gradclip._src.per_example.sensitivity import Sensitivity
from gradclip._src.tree import FlatTree
from gradclip._src.words import shown


def as_promise(promised: object) -> Sensitivity:
    """Return the promise. A number is the largest distance when one example is added or removed."""
    if isinstance(promised, Sensitivity):
        return promised
    return Sensitivity(as_number("sensitivity", promised), "example", "add_or_remove_one")


def as_dtypes(dtypes: object) -> tuple[str | None, ...]:
    """Return the names of the dtypes to try; None means the dtypes of the arrays.

    Raises ValueError for a dtype that gradients cannot have.
    """
    asked = [*dtypes] if isinstance(dtypes, Iterable) and not isinstance(dtypes, str | type) else [dtypes]
    names = [None if dtype is None else bare_name(str(getattr(dtype, "__name__", dtype))) for dtype in asked]
    for name, dtype in zip(names, asked, strict=True):
        if name is not None and name not in SUPPORTED:
            raise ValueError(f"dtypes must be among {', '.join(SUPPORTED)}, got {shown(dtype)}.")
    return tuple(names) or (None,)


def check_settings(function: Callable[[Any], Any], trials: object, seed: object) -> tuple[int, int]:
    """Return the number of trials and the seed as ints.

    Raises TypeError if the function is not callable, ValueError for a bad number of trials or a bad seed.
    """
    if not callable(function):
        raise TypeError(f"function must be callable with a tree of gradients, got {shown(function)}.")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise ValueError(f"seed must be a whole number, 0 or more, got {shown(seed)}.")
    return as_count("trials", trials), int(seed)


def check_sums(flat: FlatTree) -> None:
    """Raise an error if a function's result holds no arrays of numbers."""
    if not flat.leaves:
        raise ValueError("function returned no arrays. Return the sums of clipped gradients.")
    for leaf in flat.leaves:
        name = _dtype(leaf)
        if name not in SUPPORTED and not name.startswith(("int", "uint")):
            raise TypeError(
                f"function returned {shown(leaf)} of dtype {name}. Return sums in one of {', '.join(SUPPORTED)}, or "
                "integers."
            )


def check_alike(first: FlatTree, second: FlatTree, counts: tuple[int, int]) -> None:
    """Raise a ValueError if two results differ in structure, shape or dtype: they then have no distance."""
    made = [
        {
            path or "an array": f"{_dtype(x)}{list(np.shape(x))}"
            for path, x in zip(flat.paths(), flat.leaves, strict=True)
        }
        for flat in (first, second)
    ]
    if made[0] == made[1] and first.structure == second.structure:
        return
    raise ValueError(
        f"function returned {_listed(made[0])} for {counts[0]} examples, and {_listed(made[1])} for {counts[1]}. "
        "Return sums over the examples, with the same structure, shapes and dtypes for every batch. From "
        "gradclip.per_example_clip, return the first result only."
    )


def _dtype(x: object) -> str:
    return bare_name(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


def _listed(made: dict[str, str]) -> str:
    return shown(", ".join(f"{path} {what}" for path, what in made.items())).strip("'\"")
