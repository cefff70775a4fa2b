"""Check an update that a client has sent: whether it is acceptable, and if not, why."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gradclip._src.backends import whole_scalar
from gradclip._src.backends.registry import is_traced, models_of
from gradclip._src.checks.judge import checked_order, judge
from gradclip._src.checks.taken import check_not_traced, described, is_archive, taken, whole_leaves
from gradclip._src.checks.template import Slot, Template, of_arrays
from gradclip._src.checks.verdict import UpdateCheck, named
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.norm_at_most import known_threshold
from gradclip._src.tree import flatten
from gradclip._src.words import typed
from gradclip.typing import Ord, Threshold

_OPEN_FIRST = (
    "Open the file first: numpy.load(path, allow_pickle=False) for .npz, safetensors.numpy.load_file(path) for "
    ".safetensors, torch.load(path, weights_only=True) for .pt. Or run gradclip check FILE --max-norm C in a shell, "
    "which reads files of any size piece by piece."
)
_TENSORS_FIRST = (
    "Pass the arrays: {name: file.get_tensor(name) for name in file.keys()}, or what load_file(path) returns."
)
_OF_FLOWER = (
    "Pass the arrays: flwr.common.parameters_to_ndarrays(parameters), or record.to_numpy_ndarrays() for an ArrayRecord."
)


@with_subnormals
def check_update(tree: object, max_norm: Threshold, like: object = None, ord: Ord = 2) -> UpdateCheck:
    """Return whether an update is acceptable, with the reason: its norm is at most max_norm, and it is like a template.

    The norm is (sum |x|**p)**(1/p) over all arrays of floating-point or complex numbers. It is compared with
    `max_norm` without any rounding, as in `gradclip.norm_at_most`. An update is refused if its norm is larger, if it
    holds NaN, infinities or anything but arrays of numbers, or if it holds no floating-point numbers; with `like`, also
    if an array is missing, unknown, or of another shape or dtype. Whatever the update holds, the answer is a refusal,
    not an error.

    Args:
        tree: the update: nested containers of arrays of any framework, such as a state dict, Flower's list of arrays,
            what safetensors loads, or an open `.npz` file. Arrays on a device are copied to the host.
        max_norm: the threshold, >= 0: a number or a scalar array. Integers and fractions are not rounded.
        like: a tree with the names, shapes and dtypes that the update must have, such as the model's state dict. Its
            values are not read; `jax.ShapeDtypeStruct` will do. Without it any names, shapes and dtypes are accepted.
            Integers and booleans do not count in the norm, so a client may hide anything in them.
        ord: p: an integer from 1 to 8, `inf` for the largest magnitude, `-inf` for the smallest; None means 2. For
            complex numbers only 2, `inf` or `-inf`.

    Returns:
        An `UpdateCheck`, which is true in conditions if the update is acceptable.

    Raises:
        TypeError: the update is a path, a file object, an iterator, a model or Flower's `Parameters`; `like` holds
            anything but arrays; or `max_norm` is not a number.
        ValueError: `max_norm` is negative or NaN, `ord` is not one of the values above, `like` holds no arrays, or the
            call is traced (`jax.jit`, `torch.compile`), which hides the values.

    >>> import numpy as np
    >>> check_update({"w": np.array([3.0, 4.0])}, 5).reason
    'The norm 5 is at most 5.'
    >>> refused = check_update({"w": np.array([1, 1e-5], np.float32)}, 1)
    >>> refused.ok, refused.norm, f"{refused.excess:.1e}"
    (False, 1.00000000005, '5.0e-11')

    """
    order = checked_order(ord)
    if is_traced(max_norm):
        raise ValueError("max_norm is traced, so its value is not known. Call check_update outside jit.")
    known_threshold(whole_scalar(max_norm))
    template = None if like is None else template_of(like)
    _check_root(tree, "the update")
    found = taken(tree)
    check_not_traced(found.arrays)
    return judge(found.arrays, max_norm, order, template, faults=found.faults)


def template_of(like: object) -> Template:
    """Return the template that a tree is. Raises TypeError or ValueError if it is none."""
    _check_root(like, "like")
    slots, faults = _slots(like)
    if faults:
        raise TypeError(f"like must hold nothing but arrays, but {faults[0]}.")
    times = Counter(slot.name for slot in slots)
    twice = {name for name, count in times.items() if count > 1}
    if twice:
        raise ValueError(f"like has several arrays named {named(sorted(twice))}. Give them different names.")
    if not slots:
        raise ValueError("like holds no arrays. Pass a tree like the update, or leave it out to accept any arrays.")
    return slots


def _slots(like: object) -> tuple[list[Slot], list[str]]:
    if is_archive(like):
        found = taken(like)
        return of_arrays(found.arrays), found.faults
    try:
        flat = flatten(like)
    except Exception as error:
        raise TypeError(f"like must be a tree of arrays, which failed: {error}") from error
    slots, faults = [], []
    for path, leaf in zip(flat.paths(), whole_leaves(flat), strict=True):
        try:
            slots.append(Slot(path, *described(leaf)))
        except (AttributeError, TypeError, ValueError):
            faults.append(f"{path or 'it'} is of type {type(leaf).__name__}, without a dtype and a known shape")
    return slots, faults


def _check_root(tree: Any, what: str) -> None:
    """Raise a TypeError with the right call if a tree is something that only leads to arrays."""
    if isinstance(tree, str | bytes | os.PathLike) or (hasattr(tree, "read") and hasattr(tree, "seek")):
        raise TypeError(f"{what} must be a tree of arrays, got {typed(tree)}. {_OPEN_FIRST}")
    if type(tree).__module__.partition(".")[0] == "flwr":
        raise TypeError(f"{what} must be a tree of arrays, got Flower's {type(tree).__name__}. {_OF_FLOWER}")
    if type(tree).__name__ == "safe_open":
        raise TypeError(f"{what} must be a tree of arrays, got an open file of safetensors. {_TENSORS_FIRST}")
    if isinstance(tree, Iterator):
        raise TypeError(
            f"{what} must be a tree of arrays, got an iterator of type {type(tree).__name__}, which can be read only "
            "once. Pass dict(...) of names and arrays, or list(...) of arrays."
        )
    if models_of(tree) is not None:
        raise TypeError(
            f"{what} must be a tree of arrays, got a model of type {type(tree).__name__}. Pass model.state_dict()."
        )
