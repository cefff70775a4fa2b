"""The units of leaves: find them, and clip each by its own norm."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gradclip.arguments import check_threshold, scalar_array, warn_of_parameters
from gradclip.backends.host.protocol import in_host_memory
from gradclip.backends.registry import entries_of, entry_of, find, load
from gradclip.core.decide import Clipping
from gradclip.core.derivative import ClipRule
from gradclip.core.norms import norm_dtype
from gradclip.core.protocols import Backend
from gradclip.core.scopes import Scope, units_along, units_of_layer
from gradclip.core.units import Adaptive, AdaptiveRule, decide_units
from gradclip.core.values import Array, shape_of
from gradclip.layers.units_at_once import Following, decided, entered_copies
from gradclip.leaves import first_sparse, is_integer
from gradclip.tree import FlatTree, Sparse
from gradclip.typing import UnitAxis
from gradclip.wording import listed


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
    raise TypeError(
        f"{what} must be an axis, a tuple of axes, or None, got {axes!r:.80} of type {type(axes).__name__}. {advice}"
    )


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


def parameters_beside(flat: FlatTree, params: object) -> list[Any]:
    """Return the leaves of `params` in the order of the tree's. Raises ValueError if the trees differ."""
    leaves, structure = flat.trees.flatten(params)
    if structure == flat.structure:
        return flat.of_leaves(leaves)
    found = dict(zip(flat.trees.keys(structure), leaves, strict=True))
    every = flat.trees.keys(flat.structure)
    keys = flat.of_leaves(every)
    if set(keys) <= found.keys() <= set(every):  # other containers with the same keys, such as plain dicts
        return [found[key] for key in keys]
    lacking = [path or "the gradient" for path, key in zip(flat.paths(), keys, strict=True) if key not in found]
    paths = flat.trees.paths(structure)
    beyond = [path or "the root" for path, key in zip(paths, found, strict=True) if key not in set(every)]
    parts = [f"there is no parameter for {listed(lacking)}"] if lacking else []
    parts += [f"there is no gradient at {listed(beyond)}"] if beyond else []
    raise ValueError(f"params must be a tree of the same structure as the gradients: {', and '.join(parts)}.")


@dataclass(frozen=True)
class UnitClip:
    """How to clip units: to the thresholds in `clipping`, or to those that `adaptive` derives from parameters.

    It holds no traced array: JAX keeps the values that functions of its rules capture.
    """

    backend: Backend
    clipping: Clipping
    adaptive: Adaptive | None = None

    def leaf(self, leaves: Sequence[Any], given: Array | None, scope: Scope, name: str) -> tuple[Any, Any]:
        """Return the first of the leaves clipped, and the norms of its units.

        `given` is the threshold if it is a scalar array. If thresholds are adaptive, leaves are the gradient, its
        parameter, and the settings given as arrays.
        """
        backend, (pattern,) = self.backend, self.backend.patterns(leaves[:1])

        def primal(prepared: Sequence[Any], given: Array | None, _: None) -> tuple[list[Any], Any, list[Any]]:
            with backend.precision():
                arrays = backend.enter(prepared[:1])
                asked = replace(self.clipping, max_norm=self._threshold(prepared[1:], given, scope))
                made = decide_units(backend, arrays, asked, name, scope)
                shrunk = made.coefficient.scaled(backend, made.arrays)
                norms = backend.leave_scalar(made.norm.product(), norm_dtype(arrays), [pattern])
                return backend.leave_all(shrunk, [pattern]), norms, []

        asked = self.clipping
        rule: Any = ClipRule(asked.order, asked.max_norm, asked.nonfinite, asked.target, scope)
        rule = rule if self.adaptive is None else AdaptiveRule(rule, self.adaptive)
        call = backend.differentiable(primal, rule)
        (clipped,), norms, _ = call(list(map(backend.prepare, leaves)), given, None)
        return clipped, norms

    def _threshold(self, others: Sequence[Any], given: Array | None, scope: Scope) -> float | Array | None:
        if self.adaptive is None:
            return given if self.clipping.max_norm is None else self.clipping.max_norm
        arrays = self.backend.enter(others[:1])
        return self.adaptive.thresholds(self.backend, arrays, self.clipping.order, scope, others[1:])


def clip_units(
    flat: FlatTree, max_norms: Sequence[Any], clipping: Clipping, scopes: Sequence[Scope]
) -> tuple[list[Any], Any]:
    """Clip the units of each leaf to its threshold; return the leaves and a tree of the norms of their units."""
    warn_of_parameters(flat.leaves)
    backend = find(flat.leaves, flat.paths, *max_norms)
    known = [check_threshold(max_norm, backend=backend) for max_norm in max_norms]
    given = list(map(scalar_array, max_norms))
    made = (
        {} if any(array is not None for array in given) else _clip_at_once(backend, flat, (), known, clipping, scopes)
    )
    names = names_of(flat) if len(made) < len(flat.leaves) else []
    for i, leaf in enumerate(flat.leaves):
        if i not in made:
            asked = replace(clipping, max_norm=known[i] if isinstance(known[i], float) else None)
            made[i] = UnitClip(backend, asked).leaf([leaf], given[i], scopes[i], names[i])
    return [made[i][0] for i in range(len(made))], _norms(backend, flat, made)


def clip_units_adaptively(
    flat: FlatTree, params: Sequence[Any], both: tuple[Any, Any], clipping: Clipping, scopes: Sequence[Scope]
) -> tuple[list[Any], Any]:
    """Clip the units of each leaf likewise, to thresholds from its parameter; `both` are `clipping` and `eps`."""
    warn_of_parameters(flat.leaves)
    check_shapes(flat.leaves, params, partial(names_of, flat))
    backend = find([*flat.leaves, *params], lambda: with_parameters(names_of(flat)), *both)
    adaptive, given = adaptive_of(backend, *both)
    clip = UnitClip(backend, replace(clipping, max_norm=math.inf), adaptive)
    made = {} if given else _clip_at_once(backend, flat, params, adaptive, clipping, scopes)
    names = names_of(flat) if len(made) < len(flat.leaves) else []
    for i, (leaf, param) in enumerate(zip(flat.leaves, params, strict=True)):
        if i not in made:
            made[i] = clip.leaf([leaf, param, *given], None, scopes[i], names[i])
    return [made[i][0] for i in range(len(made))], _norms(backend, flat, made)


def _norms(backend: Backend, flat: FlatTree, made: Mapping[int, tuple[Any, Any]]) -> Any:
    """Return the tree of norms; that of a leaf that does not count is a scalar 0."""
    with backend.precision():
        zero = backend.leave_scalar(backend.zeros((), ()), "float32", flat.leaves) if flat.others else None
    return flat.arrange([made[i][1] for i in range(len(made))], zero)


def _clip_at_once(
    backend: Backend,
    flat: FlatTree,
    params: Sequence[Any],
    thresholds: Sequence[float] | Adaptive,
    clipping: Clipping,
    scopes: Sequence[Scope],
) -> dict[int, tuple[Any, Any]]:
    """Clip the leaves that one call can clip; return their results and norms."""
    leaves = flat.leaves
    if not leaves or not in_host_memory(backend) or not backend.plain([*leaves, *params]):
        return {}
    with backend.precision():
        known: Sequence[float] | Following
        if isinstance(thresholds, Adaptive):
            known = Following(thresholds, backend.enter(list(map(backend.prepare, params))))
        else:
            known = thresholds
        copies, arrays = entered_copies(backend, leaves)
        shapes = [shape_of(leaf) for leaf in leaves]
        made = decided(backend, arrays, shapes, scopes, clipping.order, known)
        if made is None:
            return {}
        made.scale()
        norms = made.norms(leaves)
        results = backend.leave_all([copies[i] for i in norms], [leaves[i] for i in norms])
    return {i: (result, norms[i]) for i, result in zip(norms, results, strict=True)}


def adaptive_of(backend: Backend, clipping: object, eps: object) -> tuple[Adaptive, list[Any]]:
    """Return the rule for adaptive thresholds, and those of `clipping` and `eps` that are arrays."""
    known = check_threshold(clipping, "clipping", backend=backend), check_threshold(eps, "eps", backend=backend)
    first, second = (one if isinstance(one, float) else None for one in known)
    arrays = scalar_array(clipping), scalar_array(eps)
    given = [array for array in arrays if array is not None]
    return Adaptive((first, second), (arrays[0] is not None, arrays[1] is not None)), given


def names_of(flat: FlatTree) -> list[str]:
    """Return the name of each leaf, for errors."""
    return [path or "the gradient" for path in flat.paths()]


def with_parameters(names: Sequence[str]) -> list[str]:
    """Return the names of gradients, then of their parameters, for errors."""
    return [*names, *(f"the parameter of {name}" for name in names)]
