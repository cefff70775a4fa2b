"""The units of leaves: the axes that index them, and the parameters beside them."""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from gradclip._src.annotations import Thresholds, UnitAxis
from gradclip._src.backends.registry import entries_of, entry_of, known, load
from gradclip._src.core.layouts import Rows, Scope, units_along, units_of_layer
from gradclip._src.core.protocols import Backend
from gradclip._src.core.units import Adaptive
from gradclip._src.core.values import shape_of
from gradclip._src.passed.arguments import check_threshold, is_array, is_single_threshold, scalar_array
from gradclip._src.passed.leaves import counted, first_sparse, is_integer, names_of
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.tree import FlatTree, Sparse
from gradclip._src.words import listed, typed


def scopes_of(flat: FlatTree, unit_axis: UnitAxis) -> list[Scope]:
    """Return the scope of each leaf's units: from its framework's layout, or from the given axis or axes.

    Raises ValueError if a leaf lacks an axis, and TypeError for an invalid axis or a sparse leaf.
    """
    sparse = first_sparse(flat)
    if sparse is not None:
        raise TypeError(_no_units(sparse, names_of(flat)))
    return scopes_of_leaves(flat.leaves, partial(names_of, flat), unit_axis)


def scopes_of_leaves(leaves: Sequence[Any], names: Callable[[], Sequence[str]], unit_axis: UnitAxis) -> list[Scope]:
    """Return the same for a list of leaves; `names` returns their names for errors."""
    for entry in entries_of(leaves):
        sparse = load(entry).first_sparse(leaves)
        if sparse is not None:
            raise TypeError(_no_units(sparse, names()))
    shapes = list(map(shape_of, leaves))
    if unit_axis is None:
        firsts = [entry is not None and entry.outputs_first for entry in map(entry_of, leaves)]
        return [units_of_layer(shape, first=first) for shape, first in zip(shapes, firsts, strict=True)]
    axes = _axes(unit_axis, "unit_axis", "Pass unit_axis=0 for rows, or unit_axis=-1 for columns.")
    return [_along(axes, shape, name) for shape, name in zip(shapes, names(), strict=True)]


def check_shown(
    leaves: Iterable[Any], names: Callable[[], Sequence[str]], whole: str, *, holder: str = "device"
) -> None:
    """Raise a ValueError for a part of a leaf that has several axes, and at most one longer than 1.

    A whole leaf of its shape is one unit, but the leaf that it is a part of may have several. `whole` is the argument
    to leave out if it is whole.
    """
    for index, shape in enumerate(map(shape_of, leaves)):
        if len(shape) > 1 and sum(length != 1 for length in shape) < 2:
            raise ValueError(
                f"{names()[index]} has shape {shape} on each {holder}, which does not show the units of the whole "
                f"leaf. If each {holder} holds whole units, leave {whole} out. If it holds a part of every unit, pass "
                "unit_axis=, such as -1 for the last axis."
            )


def rows_of(leaves: Sequence[Any], unit_axis: UnitAxis) -> Rows | None:
    """Return the layout of the units of dense leaves of one framework; None for an axis that is wrong or a list."""
    axes = unit_axis if isinstance(unit_axis, tuple) else (unit_axis,)
    if unit_axis is not None and {*map(type, axes)} != {int}:
        return None
    entry = entry_of(leaves[0])
    try:
        return _rows(tuple(map(shape_of, leaves)), unit_axis, first=entry is not None and entry.outputs_first)
    except ValueError:
        return None


# Cached: gradients have the same shapes at each step.
@lru_cache(maxsize=16)
def _rows(shapes: Sequence[tuple[int, ...]], unit_axis: UnitAxis, *, first: bool) -> Rows:
    if unit_axis is None:
        return Rows([units_of_layer(shape, first=first) for shape in shapes], shapes)
    axes = _axes(unit_axis, "unit_axis", "")
    return Rows([_along(axes, shape, "") for shape in shapes], shapes)


def scopes_beside(
    flat: FlatTree, shared_axes: UnitAxis, what: str = "axis", names: Sequence[str] | None = None
) -> list[Scope]:
    """Return the scope of each leaf's units when elements share a norm along these axes, which every leaf must have.

    Errors call the axes `what`, and the leaves by `names` instead of their paths.
    """
    scopes_of(flat, None)
    scopes = []
    for leaf, name in zip(flat.leaves, names or names_of(flat), strict=True):
        shape = shape_of(leaf)
        axes = [_axis(axis, shape, name, what) for axis in _axes(shared_axes, what, "Pass 0 for the first axis.")]
        scopes.append(units_along(tuple(axis for axis in range(len(shape)) if axis not in axes)))
    return scopes


def _no_units(sparse: Sparse, names: Sequence[str]) -> str:
    return f"units must be in dense arrays, got {sparse.kind} at {names[sparse.place]}. Call {sparse.method} on it."


def _axes(axes: UnitAxis, what: str, advice: str) -> tuple[int, ...]:
    given = axes if isinstance(axes, tuple | list) else (axes,)
    try:
        if not any(isinstance(axis, bool) for axis in given):
            return tuple(map(operator.index, given))
    except TypeError:
        pass
    raise TypeError(f"{what} must be an axis, a tuple of axes, or None, got {typed(axes)}. {advice}")


def _along(axes: tuple[int, ...], shape: tuple[int, ...], name: str) -> Scope:
    if len(shape) < 2:
        return units_along(())
    return units_along(tuple(sorted({_axis(axis, shape, name, "unit_axis") for axis in axes})))


def _axis(axis: int, shape: tuple[int, ...], name: str, what: str) -> int:
    """Return the axis counted from the start. Raises ValueError if the leaf of this name lacks it."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{what} is {axis}, but {name} of shape {shape} has no such axis. Pass an axis that it has. Clip "
            "leaves with different layouts in separate calls."
        )
    return axis % len(shape)


def check_shapes(leaves: Sequence[Any], params: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise an error that names the first gradient whose parameter holds integers or has a different shape."""
    for index, (leaf, param) in enumerate(zip(leaves, params, strict=True)):
        if is_integer(param):
            raise TypeError(
                f"the parameter of {names()[index]} holds integers, but its gradient does not. Convert the parameter "
                "to floating point."
            )
        shape, own = shape_of(leaf), shape_of(param)
        if shape != own:
            raise ValueError(
                f"gradient and parameter must have the same shape: {names()[index]} has shape {shape}, and its "
                f"parameter {own}. Pass the parameters in the order and layout of their gradients."
            )


def adaptive_of(backend: Backend, clipping: object, eps: object) -> tuple[Adaptive, list[Any]]:
    """Return the rule for adaptive thresholds, and those of `clipping` and `eps` that are arrays."""
    known = check_threshold(clipping, "clipping", backend=backend), check_threshold(eps, "eps", backend=backend)
    first, second = (one if isinstance(one, float) else None for one in known)
    arrays = scalar_array(clipping), scalar_array(eps)
    given = [array for array in arrays if array is not None]
    return Adaptive((first, second), (arrays[0] is not None, arrays[1] is not None)), given


def thresholds_of_leaves(flat: FlatTree, max_norm: Thresholds) -> list[Any]:
    """Return the threshold of each leaf: the only one, or that of a prefix above it."""
    if is_single_threshold(max_norm):
        return [max_norm] * len(flat.leaves)
    prefix, groups = flat.split_by(max_norm)
    of_leaf = {index: threshold for threshold, group in zip(prefix.leaves, groups, strict=True) for index in group}
    return [of_leaf[index] for index in range(len(of_leaf))]


def parameters_beside(flat: FlatTree, params: object) -> list[Any]:
    """Return the leaves of `params` in the order of the tree's. Raises ValueError if the trees differ."""
    leaves, structure = flat.trees.flatten(params)
    if structure == flat.structure:
        return flat.of_leaves(leaves)
    given = FlatTree(leaves, structure, flat.trees)
    found = dict(zip(flat.trees.keys(given), leaves, strict=True))
    every = flat.trees.keys(flat)
    keys = flat.of_leaves(every)
    if set(keys) <= found.keys() <= set(every):  # other containers with the same keys, such as plain dicts
        return [found[key] for key in keys]
    lacking = [path or "the gradient" for path, key in zip(flat.paths(), keys, strict=True) if key not in found]
    beyond = [path or "the root" for path, key in zip(given.paths(), found, strict=True) if key not in set(every)]
    parts = [f"there is no parameter for {listed(lacking)}"] if lacking else []
    parts += [f"there is no gradient at {listed(beyond)}"] if beyond else []
    raise ValueError(f"params must be a tree of the same structure as the gradients: {', and '.join(parts)}.")


def weights_of(params: ParameterList, weights: object) -> dict[int, Any]:
    """Return the weights by the id of their parameter, or of their array in a tree. Raises if they do not match."""
    if params.tree is not None:
        flat = counted(params.tree, params.choice)
        if weights is None:
            raise TypeError(
                "a tree of arrays holds only gradients. Pass the parameters as params=, a tree of the same structure."
            )
        return _once(flat.leaves, parameters_beside(flat, weights))
    if weights is None:
        for index, (parameter, grad) in enumerate(zip(params.parameters, params.gradients, strict=True)):
            if grad is not None and not (known(parameter) and is_array(parameter)):
                raise TypeError(
                    f"{params.name(index)} is of type {type(parameter).__name__}, not an array, so it has no norm. "
                    "Pass params=, a list with one array for each parameter."
                )
        weights = params.parameters
    if not isinstance(weights, list | tuple) or len(weights) != len(params.gradients):
        raise ValueError(
            f"params must be a list with one array for each of the {len(params.gradients)} parameters, in their order."
        )
    return _once(params.parameters, weights)


def _once(owners: Sequence[Any], weights: Sequence[Any]) -> dict[int, Any]:
    """Return the weights by the id of their owner. Raises ValueError if one is listed with two different weights."""
    found = {id(owner): weight for owner, weight in zip(owners, weights, strict=True)}
    if any(found[id(owner)] is not weight for owner, weight in zip(owners, weights, strict=True)):
        raise ValueError("the same parameter or array is listed twice, with two different weights. Pass it once.")
    return found


def with_parameters(names: Sequence[str]) -> list[str]:
    """Return the names of gradients, then of their parameters, for errors."""
    return [*names, *(f"the parameter of {name}" for name in names)]


def parameters_of(flat: FlatTree, indices: Sequence[int] | None = None) -> list[str]:
    """Return the names of the parameters of all leaves, or of those at `indices`, for errors."""
    names = with_parameters(names_of(flat))[len(flat.leaves) :]
    return names if indices is None else [names[index] for index in indices]
