"""Clip each unit of the gradients of parameters, or of a tree of NumPy arrays, in place by its own norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradclip.arguments import is_array, is_single_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import any_distributed, whole_scalar
from gradclip.backends.registry import find, known
from gradclip.core.arrays import Arrays
from gradclip.core.decision import Clipping
from gradclip.core.layouts import Rows
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order
from gradclip.core.protocols import Backend
from gradclip.core.rules import CLIP
from gradclip.core.several import Each, Following
from gradclip.core.units import Adaptive
from gradclip.core.values import shape_of
from gradclip.distributed.processes import ONE_PROCESS
from gradclip.functional import adaptive_of
from gradclip.inplace.gradients import Gradients, entered
from gradclip.inplace.layerwise import Layerwise
from gradclip.inplace.parts import clip_parts
from gradclip.leaves import counted
from gradclip.parameters import ParameterList
from gradclip.tree import flatten
from gradclip.typing import Ord, Parameters, Policy, Threshold, Thresholds, UnitAxis
from gradclip.unit_axes import check_shapes, parameters_beside, scopes_of_leaves, with_parameters


@ordinary_arithmetic
def clip_grad_unit_norm_(
    parameters: Parameters,
    max_norm: Thresholds,
    ord: Ord = 2,
    *,
    unit_axis: UnitAxis = None,
    nonfinite: Policy = "propagate",
) -> Any:
    """Scale each unit of each gradient of `parameters` in place by min(1, max_norm / its own norm).

    Args:
        parameters: as in `gradclip.clip_grad_layer_norm_`, with dense gradients. Arrays of a tree must not share
            memory.
        max_norm: the threshold of each unit, >= 0: a number, or a list with one threshold per parameter. For a tree of
            NumPy arrays, a number or a prefix of the tree.
        ord: which norm, as in `gradclip.global_norm`.
        unit_axis: the axis or axes that index the units, as in `gradclip.clip_by_unit_norm`. None for the framework's
            own layout.
        nonfinite: what to do if a unit contains NaN or infinity, as in `gradclip.clip_by_unit_norm`.

    Returns:
        The norms of the units before clipping: a list with one array per parameter, None for a parameter without a
        gradient. For a tree of NumPy arrays, a tree of arrays.

    Raises:
        The errors of `gradclip.clip_grad_layer_norm_` and `gradclip.clip_by_unit_norm`. The gradients are then
        unchanged.

    >>> import numpy as np
    >>> update = {"w": np.array([[3.0, 0.3], [4.0, 0.4]])}
    >>> norms = clip_grad_unit_norm_(update, max_norm=1.0)
    >>> norms["w"].tolist(), update["w"].round(6).tolist()
    ([5.0, 0.5], [[0.6, 0.3], [0.8, 0.4]])

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    call = _Call.of(parameters, "clip_grad_unit_norm_", flatten(max_norm).leaves)
    layers = Layerwise.of(call.params, _for_each_leaf(call.params, max_norm), call.backend, call.gradients)
    return call.clip(layers, Each(layers.thresholds), clipping, unit_axis)


@ordinary_arithmetic
def adaptive_grad_clip_(
    parameters: Parameters,
    clipping: Threshold = 0.01,
    eps: Threshold = 1e-3,
    ord: Ord = 2,
    *,
    weights: object = None,
    unit_axis: UnitAxis = None,
    nonfinite: Policy = "propagate",
) -> Any:
    """Clip each unit of the gradients in place to clipping * max(norm of the same unit of the parameters, eps).

    Args:
        parameters: as in `clip_grad_unit_norm_`. Leave out those of the last layer, as timm does.
        clipping: the largest allowed ratio of gradient norm to parameter norm, >= 0; `inf` clips nothing.
        eps: a lower limit for the parameter norm, >= 0.
        ord: which norm, as in `gradclip.global_norm`.
        weights: the values of the parameters. Needed only if `parameters` are not arrays themselves: then a list with
            one array per parameter. For a tree of NumPy arrays (the gradients), a tree of the same structure.
        unit_axis: the axis or axes that index the units, as in `gradclip.clip_by_unit_norm`. None for the framework's
            own layout.
        nonfinite: what to do if a unit contains NaN or infinity, as in `gradclip.adaptive_grad_clip`.

    Returns:
        The norms of the gradients' units before clipping, as `clip_grad_unit_norm_` returns them. The bound is that of
        `gradclip.adaptive_grad_clip`.

    Raises:
        TypeError: `parameters` are not arrays, and `weights` is missing.
        ValueError: the shapes of weights and gradients differ. Other errors are those of `clip_grad_unit_norm_`.

    After an error, the gradients are unchanged.

    >>> import numpy as np
    >>> update, weights = np.array([[3.0, 0.3], [4.0, 0.4]]), np.array([[6.0, 60.0], [8.0, 80.0]])
    >>> norms = adaptive_grad_clip_(update, clipping=0.1, weights=weights)
    >>> norms.tolist(), update.round(6).tolist()
    ([5.0, 0.5], [[0.6, 0.3], [0.8, 0.4]])

    """
    asked = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    call = _Call.of(parameters, "adaptive_grad_clip_", [whole_scalar(clipping), whole_scalar(eps)])
    adaptive, given = adaptive_of(call.backend, clipping, eps)
    layers = Layerwise.of(call.params, 0.0, call.backend, call.gradients)
    beside = _weights(call.params, weights)
    mine = call.checked([beside[id(call.gradients.owners[index])] for (index,) in layers.groups.groups], layers)
    if call.backend.concrete:
        adaptive, given = Adaptive(adaptive.known), []
    return call.clip(layers, Following(adaptive, call.backend.enter(mine), given), asked, unit_axis)


@dataclass(frozen=True)
class _Call:
    """The gradients of one call, fully checked."""

    params: ParameterList
    gradients: Gradients
    backend: Backend
    arrays: Arrays

    @classmethod
    def of(cls, parameters: Parameters, name: str, scalars: Sequence[object]) -> _Call:
        params = ParameterList.of(parameters)
        if any_distributed(params.parameters) or any_distributed(params.gradients):
            functional = "adaptive_grad_clip" if name.startswith("adaptive") else "clip_by_unit_norm"
            raise ValueError(
                f"{name} does not support distributed tensors. To clip by unit, call gradclip.{functional}, which "
                "returns new tensors; to clip by the global norm, call gradclip.clip_grad_norm_."
            )
        return cls(params, *entered(params, ONE_PROCESS, *scalars, to_write=True, apart=True))

    def _grads(self, groups: Sequence[Sequence[int]]) -> list[Any]:
        """Return each group's only gradient."""
        return [self.gradients.grads[index] for (index,) in groups]

    def names(self, groups: Sequence[Sequence[int]]) -> list[str]:
        """Return the name of each group's only gradient, for errors."""
        names = self.gradients.names()
        return [names[index] for (index,) in groups]

    def checked(self, weights: Sequence[Any], layers: Layerwise) -> list[Any]:
        """Return the weights of each layer as backend arrays. Raises if one is no array or has another shape."""
        grads, names = self._grads(layers.groups.groups), partial(self.names, layers.groups.groups)
        find([*grads, *weights], lambda: with_parameters(names()))
        check_shapes(grads, weights, names)
        return list(map(self.backend.prepare, weights))

    def clip(self, layers: Layerwise, thresholds: Each | Following, clipping: Clipping, unit_axis: UnitAxis) -> Any:
        """Measure all gradients, then clip them; return their norms in the caller's structure."""
        backend, indices = self.backend, [index for (index,) in layers.groups.groups]
        gradients, arrays = self.gradients, self.arrays
        if indices != list(range(len(arrays))):
            gradients, arrays = gradients.chosen(indices), backend.chosen(arrays, indices)
        scopes = scopes_of_leaves(gradients.grads, gradients.names, unit_axis)
        layout = Rows(scopes, list(map(shape_of, gradients.grads)))
        with backend.precision():
            return layers.arranged(clip_parts(gradients, backend, arrays, layout, thresholds, clipping))


def _for_each_leaf(params: ParameterList, max_norm: Thresholds) -> Thresholds:
    """Expand thresholds given as a prefix to one per array; return other thresholds unchanged."""
    if params.tree is None or is_single_threshold(max_norm):
        return max_norm
    flat = counted(params.tree)
    prefix, groups = flat.split_by(max_norm)
    of_leaf = {i: threshold for threshold, group in zip(prefix.leaves, groups, strict=True) for i in group}
    return flat.arrange([of_leaf[i] for i in range(len(of_leaf))], 0.0)


def _weights(params: ParameterList, weights: object) -> dict[int, Any]:
    """Return the weights by the id of their parameter, or of their array in a tree. Raises if they do not match."""
    if params.tree is not None:
        flat = counted(params.tree)
        if weights is None:
            raise TypeError(
                "a tree of arrays holds only gradients. Pass the parameters as weights=, a tree of the same structure."
            )
        return _once(flat.leaves, parameters_beside(flat, weights))
    if weights is None:
        for index, (parameter, grad) in enumerate(zip(params.parameters, params.gradients, strict=True)):
            if grad is not None and not (known(parameter) and is_array(parameter)):
                raise TypeError(
                    f"{params.name(index)} is of type {type(parameter).__name__}, not an array, so it has no norm. "
                    "Pass weights=, a list with one array for each parameter."
                )
        weights = params.parameters
    if not isinstance(weights, list | tuple) or len(weights) != len(params.gradients):
        raise ValueError(
            f"weights must be a list with one array for each of the {len(params.gradients)} parameters, in their order."
        )
    return _once(params.parameters, weights)


def _once(owners: Sequence[Any], weights: Sequence[Any]) -> dict[int, Any]:
    """Return the weights by the id of their owner. Raises ValueError if one is listed with two different weights."""
    found = {id(owner): weight for owner, weight in zip(owners, weights, strict=True)}
    if any(found[id(owner)] is not weight for owner, weight in zip(owners, weights, strict=True)):
        raise ValueError("the same parameter or array is listed twice, with two different weights. Pass it once.")
    return found
