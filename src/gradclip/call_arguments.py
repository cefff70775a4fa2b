"""What a clipped function is called with: parameters that have derivatives, and batches in mappings that are no trees.

Trees know dicts; a batch in another mapping, such as a `UserDict` or a tokenizer's `BatchEncoding`, becomes a dict on
the way in, and what it was before the function sees it.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import optree

from gradclip.backends import framework_of
from gradclip.quantities import shown
from gradclip.tree import flatten

_INSTEAD = (
    "pass dict(model.named_parameters()), and compute with torch.func.functional_call(model, parameters, (x,)) in the "
    "loss."
)


def check_parameters(position: int, tree: Any) -> None:
    """Raise a TypeError for an argument to differentiate that holds a module, a generator, or a mapping of its own."""
    if isinstance(tree, Iterator):
        raise TypeError(f"argument {position} is a {type(tree).__name__}, as of model.parameters(): {_INSTEAD}")
    for leaf in flatten(tree).leaves:
        if framework_of(leaf) is not None:
            continue
        kind = type(leaf).__name__
        if hasattr(leaf, "named_parameters"):
            raise TypeError(f"argument {position} holds a module ({kind}), not its parameters: {_INSTEAD}")
        if isinstance(leaf, Mapping):
            raise TypeError(f"argument {position} holds a {kind}, whose arrays cannot be seen: pass dict(...) of it.")


def has_mappings(tree: Any) -> bool:
    """Say whether a tree holds mappings that it takes for leaves."""
    return any(isinstance(leaf, Mapping) for leaf in flatten(tree).leaves)


def opened(tree: Any) -> Any:
    """Return a tree with dicts in place of such mappings."""
    return optree.tree_map(lambda leaf: _as_dict(leaf) if isinstance(leaf, Mapping) else leaf, tree)


def _as_dict(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: opened(value) for key, value in mapping.items()}


def closed(like: Any, tree: Any) -> Any:
    """Return an opened tree with the mappings that `like` has, their values those of the tree."""
    return optree.tree_map(lambda old, new: _refilled(old, new) if isinstance(old, Mapping) else new, like, tree)


def _refilled(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with other values."""
    values = {key: closed(value, new[key]) for key, value in old.items()}
    try:
        if not hasattr(old, "__setitem__"):
            return type(old)(values)  # type: ignore[call-arg]
        made: Any = copy(old)
        for key, value in values.items():
            made[key] = value
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a batch of type {type(old).__name__} cannot be made again for one example, got {shown(old)}: pass "
            "dict(...) of it."
        ) from error
    return made
