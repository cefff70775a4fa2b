"""The settings of adaptive thresholds, and the history of norms that they are computed from, of any framework.

A layer has the history of the same name, whatever wraps the model, and of no other shape.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.annotations import Scalar
from gradclip._src.backends.imported import exportable
from gradclip._src.backends.registry import entry_of, framework_of, names_of_all
from gradclip._src.core.formats import FLOAT32, FLOAT64, Format, dtype_name, format_of
from gradclip._src.core.values import Array
from gradclip._src.public import public
from gradclip._src.words import listed, typed

_LARGEST_WINDOW = 2**15  # its square fits 32 bits, the only integers JAX has by default


def check_between(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Return a number from `low` to `high`, both allowed; `low` is not allowed with `above_low`.

    Raises TypeError for anything but a real number, ValueError for a number out of range or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {typed(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if operator.gt(value, 0) else -math.inf
    if not low <= number <= high or (above_low and number == low):
        where = f"above {low!r} and at most" if above_low else f"from {low!r} to"
        raise ValueError(f"{name} must be {where} {high!r}, got {value!r}.")
    return number


def check_window(name: str, value: object) -> int:
    """Return a number of norms. Raises TypeError unless it is a whole number, ValueError unless it is 1 to 32,768."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {typed(value)}.")
    number = int(value)
    if not 1 <= number <= _LARGEST_WINDOW:
        raise ValueError(f"{name} must be from 1 to {_LARGEST_WINDOW}, got {value!r}.")
    return number


def framework_like(array: object) -> Any:
    """Return the framework of an array that shows where numbers are to be. Raises TypeError for anything else."""
    framework = framework_of(array)
    if framework is None:
        raise TypeError(f"like must be an array of {names_of_all()}, got {typed(array)}.")
    return framework


_WIDE = (FLOAT32.name, FLOAT64.name)


@public
@exportable
class NormHistory(NamedTuple):
    """The last norms observed, newest first, and their number. Empty places hold `inf`.

    Attributes:
        norms: an array of shape (*shape, window).
        count: how many norms it holds, an integer array of shape `shape`.

    `shape` is that passed to `init`: () for one norm at each step. A history is a tree of two arrays: pass it through
    `jax.jit`, carry it in `jax.lax.scan`, save and load it.
    """

    norms: Any
    count: Any


@public
@exportable
class SteadyHistory(NamedTuple):
    """The last norms observed, their number, and the threshold that they have led to.

    Attributes:
        norms: as in `gradclip.NormHistory`.
        count: as in `gradclip.NormHistory`.
        held: the threshold, an array of shape `shape`; 0 before the first norm.

    """

    norms: Any
    count: Any
    held: Any


AnyHistory = NormHistory | SteadyHistory


def norms_kept(low: float, high: float, form: Format) -> tuple[float, float]:
    """Return the smallest and largest norm to keep, if thresholds are `low` to `high` times a norm.

    These norms and their thresholds are normal numbers of the format.

    Frameworks disagree on numbers below that range. Both limits are powers of two, so they are exact in it.
    """
    up, down = (2.0 ** max(0, math.ceil(math.log2(by))) for by in (high, 1 / low))
    return form.tiny * down, 2.0 ** (form.max_exponent - 2) / up


def of_one_norm(norms: object) -> bool:
    """Say whether a history is that of one norm at each step, in a NumPy array."""
    return type(norms) is np.ndarray and norms.ndim == 1


def namespace_of(array: object) -> ModuleType:
    """Return the operations of the framework of an array."""
    return framework_like(array).namespace


def _on_host(norm: Any) -> np.ndarray:
    """Return numbers, arrays of any framework, or a list of them, as float64 numbers in host memory."""
    if isinstance(norm, list | tuple):
        return np.array([_on_host(one) for one in norm], np.float64)
    framework = framework_of(norm)
    if framework is None:
        return np.asarray(norm, np.float64)
    held = framework.on_host(norm)
    return held.numbers().reshape(held.data.shape)


def of_framework(norms: Array, norm: Scalar | Sequence[Scalar]) -> Any:
    """Convert a norm, or norms of layers, to the framework and device of `norms`, in float32 or wider."""
    entry = entry_of(norms)
    if isinstance(norm, Mapping):
        raise TypeError(
            "norms of layers must be an array or a list, got a dict. Pass its leaves, in the order of the thresholds."
        )
    if isinstance(norm, list | tuple) and norm and all(entry_of(one) is entry for one in norm):
        norm = namespace_of(norms).stack(list(norm))
    if entry_of(norm) is entry:
        norm = framework_like(norms).beside(norm, norms)
        # In a half type the limits of what is kept would be zero and infinity.
        narrow = dtype_name(norm) not in _WIDE
        return namespace_of(norms).astype(norm, namespace_of(norms).float32) if narrow else norm
    form, values = format_of(norms), _on_host(norm)
    held = np.where(np.abs(values) <= form.largest, values, math.inf)
    if held.shape:
        return framework_like(norms).like(norms, form.name, held)
    return namespace_of(norms).full_like(norms[..., 0], float(held))


_WRAPPERS = frozenset(("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""What wrappers of a model, such as `torch.compile` and DDP, add to the names of its parameters."""
_SHAPE = ", of shape "
_BY_PLACE = re.compile(r"(parameters\[)?\d+\]?")
_HELD = "this AdaptiveThreshold, or a state that it loads, has observed"
_ANEW = "or make a new AdaptiveThreshold, whose history begins anew"


def identity(name: str, shape: tuple[int, ...] | None) -> str:
    """Return what a layer is known by: its name, or its place, and its shape if it is that of the whole."""
    return name if shape is None else f"{name}{_SHAPE}{shape}"


def places_of(given: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Return the place of each given layer among the known ones; None for a new one. All known ones must be given.

    Raises ValueError where it is not sure which is which.
    """
    if tuple(given) == tuple(known):
        return list(range(len(known)))
    (names, shapes), (old_names, old_shapes) = map(_parted, (given, known))
    keys, old_keys = _keys(names), _keys(old_names)
    if not all(len({*each}) == len(each) for each in (keys, old_keys)):
        keys, old_keys = names, old_names  # without the names of wrappers, some are the same
    place_of = {key: place for place, key in enumerate(old_keys)}
    places = [place_of.get(key) for key in keys]
    mine = {*keys}
    gone = [old for key, old in zip(old_keys, known, strict=True) if key not in mine]
    if gone:
        said = repr(gone[0]), listed([*map(repr, given)]) or "no layers"
        raise _unlike(*said, "Pass it, too: without a gradient it keeps its threshold. Pass all by the same names")
    unclear = len(mine) < len(keys) or len(place_of) < len(known)
    if unclear or (None in places and known and all(map(_BY_PLACE.fullmatch, names))):
        what = f"{len(given)} layers, so which of them are new is not known"
        raise _unlike(
            f"{len(known)} layers", what, "Name them from the first step on, as model.named_parameters() does"
        )
    for place, shape, one in zip(places, shapes, given, strict=True):
        if place is not None and "" not in (shape, old_shapes[place]) and shape != old_shapes[place]:
            raise _unlike(repr(known[place]), repr(one), "Pass the same parameters")
    return places


def other_kind(known: Sequence[str] | None, given: Sequence[str] | None) -> ValueError:
    """Return the error where one is the norm of all gradients, and the other those of layers."""
    said = ["one norm" if one is None else f"the norms of {len(one)} layers" for one in (known, given)]
    return ValueError(
        f"{_HELD} {said[0]}, got {said[1]}. Make one for all gradients together, and one for layers, each with its own "
        "state."
    )


def _unlike(known: str, given: str, advice: str) -> ValueError:
    return ValueError(f"{_HELD} {known}, got {given}. {advice}, {_ANEW}.")


def _parted(layers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names, and the shapes: empty where only a part was known."""
    each = [one.rpartition(_SHAPE) if _SHAPE in one else (one, "", "") for one in layers]
    return [name for name, _, _ in each], [shape for _, _, shape in each]


def _keys(names: Sequence[str]) -> list[str]:
    return [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
