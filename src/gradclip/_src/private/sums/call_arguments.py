"""Checks of the arguments of a clipped function: positions, parameters, batches, and mappings that are not trees.

A tree may hold dicts. A batch in a different mapping, such as a `UserDict` or a tokenizer's `BatchEncoding`, is
converted to a dict first, and back to its own type before the function sees it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from numbers import Integral, Number
from typing import Any

import optree

from gradclip._src.annotations import Mask
from gradclip._src.backends.entries import Entry
from gradclip._src.backends.registry import (
    all_numbers,
    conversions,
    differentiating,
    entries_of,
    framework_of,
    instead_of_parameters,
    known,
    models_of,
    names_of_all,
)
from gradclip._src.core.formats import dtype_name
from gradclip._src.passed.arguments import is_array, shape_of_mask
from gradclip._src.passed.leaves import is_integer
from gradclip._src.tree import flatten
from gradclip._src.words import listed, shown, typed


def positions(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    """Return argument positions as a tuple. Raises ValueError for an empty one, a negative or a repeated position."""
    if not isinstance(given, Integral | Iterable):
        raise TypeError(f"{name} must be one or several positions, got {typed(given)}.")
    numbers = (given,) if isinstance(given, Integral) else tuple(given)
    if not numbers:
        raise ValueError(f"{name} must not be empty. Pass the position of an argument, such as {name}=0.")
    if any(isinstance(i, bool) or not isinstance(i, Integral) or i < 0 for i in numbers):
        raise ValueError(f"{name} must be positions counted from 0, got {shown(given)}.")
    if len({*numbers}) < len(numbers):
        raise ValueError(f"{name} names a position twice, got {shown(given)}. Pass each once.")
    return tuple(map(int, numbers))


def needed_positions(fun: Callable[..., Any]) -> list[int]:
    """Return the positions of the required arguments of a function, as far as its signature shows them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [i for i, p in enumerate(by_position) if p.default is p.empty]


def others_than(
    positions: Iterable[int], argnums: int | tuple[int, ...] | None, prng_argnum: int | None
) -> tuple[int, ...]:
    """Return the positions of arguments that are neither differentiated nor a random key."""
    differentiated = argnums if isinstance(argnums, tuple) else (argnums,)
    return tuple(i for i in positions if i not in differentiated and i != prng_argnum)


def not_said(name: str, others: tuple[int, ...]) -> str:
    """Return the error for a missing `batch_argnums` when several arguments may carry the batch."""
    return (
        f"{len(others)} arguments may carry the batch, at positions {others}. Tell {name} which ones do: "
        f"batch_argnums={others} if all do. Arguments that are left out go to every example whole."
    )


def batch_size(mapped_args: Sequence[Any], mask: Mask) -> int:
    """Return the length of axis 0, which all leaves and the mask must share.

    Raises a ValueError that names the leaves if they do not, and as `shapes_of_batch`.
    """
    shapes = shapes_of_batch(mapped_args)
    if mask is not None:
        shapes["mask"] = shape_of_mask(mask)
    first = next(iter(shapes.values()), ())
    if not first or any(shape[:1] != first[:1] for shape in shapes.values()) or len(shapes.get("mask", "1")) != 1:
        # List the leaves that differ from the first before the others: the list is cut.
        one, *others = shapes.items() or [("", ())]
        others.sort(key=lambda item: item[1][:1] == first[:1])
        found = [f"{name} {shape}" for name, shape in (one, *others) if name]
        raise ValueError(
            "the arguments in batch_argnums, and the mask, must all have the same size along axis 0, the batch; "
            f"the shapes are {listed(found) or 'missing: there are no arrays'}. Give each a row for each "
            "example, and leave arguments that every example needs whole out of batch_argnums."
        )
    if first[0] is None:
        raise ValueError(
            "the batch size must be known while tf.function traces the function. Put it in the signature, or make "
            "all batches the same size, for example with dataset.batch(64, drop_remainder=True)."
        )
    return first[0]


def shapes_of_batch(mapped_args: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of the arguments, by name. Raises a ValueError for the first that is no array."""
    shapes = {}
    for i, arg in enumerate(mapped_args):
        flat = flatten(arg)
        for leaf, path in zip(flat.leaves, flat.paths(), strict=True):
            if not hasattr(leaf, "shape"):
                raise ValueError(f"argument {i}{path} is {_no_array(leaf)}")
            shapes[f"argument {i}{path}"] = tuple(leaf.shape)
    return shapes


def _no_array(leaf: object) -> str:
    """Return what a leaf of a batch is instead of an array, and what to pass."""
    if isinstance(leaf, str | bytes):
        more = "Leave text out of the batch, or pass numbers in its place"
    elif isinstance(leaf, Number):
        more = "Pass numbers of several examples as one array, and a number for all of them outside batch_argnums"
    elif hasattr(leaf, "__iter__") or hasattr(leaf, "__getitem__"):
        more = (
            "It gives batches or examples and is none itself: pass the arrays of one batch, such as next(iter(loader))"
        )
    else:
        more = "Pass arrays of shape (batch, ...)"
    return f"{typed(leaf)}, not an array with the batch on axis 0. {more}."


def check_positions(
    args: Sequence[Any], argnums: int | tuple[int, ...] | None, batch_argnums: tuple[int, ...], prng_argnum: int | None
) -> None:
    """Raise a TypeError if there is no argument at one of the positions."""
    differentiated = argnums if isinstance(argnums, tuple) else (argnums or 0,)
    needed = max(*batch_argnums, *differentiated, prng_argnum or 0)
    if len(args) <= needed:
        raise TypeError(
            f"argument {needed} must be passed by position (argnums={argnums}, batch_argnums="
            f"{batch_argnums}, prng_argnum={prng_argnum}), got {len(args)} positional arguments."
        )


def check_assumption(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | tuple[int, ...] | None,
    batch_argnums: tuple[int, ...],
    prng_argnum: int | None,
) -> None:
    """Raise a TypeError if `batch_argnums` was left out and more than one argument may carry the batch."""
    others = others_than(range(len(args)), argnums, prng_argnum)
    if len(others) > 1:
        raise TypeError(not_said(name, others))
    count = batch_size([arg if i in batch_argnums else None for i, arg in enumerate(args)], None)
    for keyword, given in kwargs.items():
        lengths = [getattr(leaf, "shape", ())[:1] for leaf in flatten(given).leaves]
        if count > 1 and (count,) in lengths:
            raise TypeError(
                f"every example would get all of {keyword}, which has {count} rows like the batch. If it carries the "
                f"batch, pass it by position and list all such positions in batch_argnums= of {name}. If every example "
                f"should get all of it, pass batch_argnums={batch_argnums[0]}."
            )


def check_parameters(position: int, tree: object) -> None:
    """Raise a TypeError if an argument to differentiate is a generator or holds a module, a mapping or integers."""
    if isinstance(tree, Iterator):
        kind = type(tree).__name__
        raise TypeError(f"argument {position} is a {kind}, as model.parameters() returns: {instead_of_parameters()}")
    flat = flatten(tree)
    for index, leaf in enumerate(flat.leaves):
        if known(leaf):
            framework_of(leaf)  # loaded, and with it the names of its dtypes, which compiled code cannot keep
            if is_array(leaf) and is_integer(leaf):
                raise TypeError(
                    f"argument {position}{flat.paths()[index]} has dtype {dtype_name(leaf)}, which has no gradient. "
                    "Pass floating-point parameters, and integers in another argument."
                )
            continue
        kind = type(leaf).__name__
        models = models_of(leaf)
        if models is not None:
            raise TypeError(f"argument {position} holds a module ({kind}), not its parameters: {models.parameters}")
        if known(getattr(leaf, "value", None)):
            raise TypeError(f"argument {position} holds a {kind}, not an array: pass [v.value for v in ...].")
        if isinstance(leaf, Mapping):
            raise TypeError(f"argument {position} holds a {kind}, which hides its arrays: pass dict(...) of it.")
        if callable(leaf):
            raise TypeError(
                f"argument {position} holds a function ({kind}), which has no gradient. Pass the arrays alone. From an "
                "Equinox model: params, static = equinox.partition(model, equinox.is_inexact_array), and "
                "equinox.combine(params, static) in the loss."
            )


def has_mappings(tree: object) -> bool:
    """Say whether a tree holds mappings that count as leaves."""
    return any(isinstance(leaf, Mapping) for leaf in flatten(tree).leaves)


def opened(tree: object) -> Any:
    """Return a tree with those mappings converted to dicts."""
    return optree.tree_map(lambda leaf: _as_dict(leaf) if isinstance(leaf, Mapping) else leaf, tree)


def _as_dict(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: opened(value) for key, value in mapping.items()}


def closed(like: object, tree: object) -> Any:
    """Convert the dicts of an opened tree back to the mappings of `like`."""
    return optree.tree_map(lambda old, new: _refilled(old, new) if isinstance(old, Mapping) else new, like, tree)


def _refilled(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with new values."""
    values = {key: closed(value, new[key]) for key, value in old.items()}
    try:
        if not hasattr(old, "__setitem__"):
            return type(old)(values)  # type: ignore[call-arg]
        made: Any = copy(old)
        for key, value in values.items():
            made[key] = value
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a batch of type {type(old).__name__} cannot be rebuilt for one example, got {shown(old)}: pass "
            "dict(...) of it."
        ) from error
    return made


def framework_to_differentiate(
    args: Sequence[Any], argnums: int | tuple[int, ...], batch_argnums: Sequence[int]
) -> Entry:
    """Return the framework of the first argument to differentiate. Raises TypeError for what has no derivatives."""
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    for position in positions:
        check_parameters(position, args[position])
    first = positions[0]
    leaves = flatten(args[first]).leaves
    found = entries_of(leaves)
    for entry in found:
        if not entry.has_derivatives:
            raise TypeError(
                f"argument {first} holds {entry.name} arrays, which gradclip cannot differentiate. Convert them with "
                f"{conversions(entry)}. If you already have per-example gradients, call gradclip.per_example_clip."
            )
    if found or all_numbers(leaves):
        framework = differentiating(leaves)
        check_batches_of(framework, args, batch_argnums)
        return framework
    raise TypeError(
        f"argument {first} must hold the parameters, in arrays of {names_of_all(has_derivatives=True)}, got "
        f"{typed(args[first])}. Pass them there, or pass argnums=."
    )


def check_batches_of(framework: Entry | None, args: Sequence[Any], batch_argnums: Sequence[int]) -> None:
    """Raise a TypeError if a batch holds arrays that cannot be mapped, or of another framework than the parameters."""
    for i in batch_argnums:
        for other in entries_of(flatten(args[i]).leaves):
            if not other.has_derivatives and other.module != "numpy":
                raise TypeError(
                    f"argument {i} holds {other.name} arrays, which gradclip cannot split into examples. Convert them "
                    f"with {conversions(other)}. If you already have per-example gradients, call "
                    "gradclip.per_example_clip."
                )
            if framework is not None and other.has_derivatives and other is not framework:
                raise TypeError(
                    f"argument {i} holds arrays of {other.module}, but the parameters are of {framework.module}. "
                    "Convert one of them."
                )
