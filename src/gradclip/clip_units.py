"""Clipping by unit: each part of a layer that produces one output has its own norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradclip.arguments import in_place, is_single_threshold
from gradclip.backends import whole_scalar
from gradclip.backends.registry import find
from gradclip.core.arrays import Arrays
from gradclip.core.decision import Clipping
from gradclip.core.layouts import Rows
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import EUCLIDEAN, Order
from gradclip.core.rules import CLIP
from gradclip.core.scopes import Scope
from gradclip.core.several import Each, Following
from gradclip.core.units import Adaptive
from gradclip.core.values import shape_of
from gradclip.flush_mode import with_subnormals
from gradclip.functional import adaptive_of, clip_units, clip_units_adaptively
from gradclip.gradients import Taken
from gradclip.inplace_layers import Layerwise, checked, clip_parts
from gradclip.leaves import counted
from gradclip.tree import FlatTree, flatten
from gradclip.typing import Ord, Parameters, Policy, Threshold, Thresholds, Tree, UnitAxis
from gradclip.unit_axes import (
    check_shapes,
    parameters_beside,
    scopes_beside,
    scopes_of,
    scopes_of_leaves,
    thresholds_of_leaves,
    weights_of,
    with_parameters,
)


@with_subnormals
def clip_by_unit_norm(
    tree: Tree, max_norm: Thresholds, *, unit_axis: UnitAxis = None, ord: Ord = 2, nonfinite: Policy = "propagate"
) -> tuple[Tree, Any]:
    """Scale each unit of each leaf by min(1, max_norm / its own norm). A unit is the part that produces one output.

    The axes that index the outputs depend on the framework's layout, so the units do too:

    | axes | PyTorch                                   | JAX and NumPy, as optax                        |
    |------|-------------------------------------------|------------------------------------------------|
    | 0, 1 | the whole leaf                            | the whole leaf                                 |
    | 2    | each row of (out, in): axis 0             | each column of (in, out): axis 1               |
    | 3    | (out, in, width): axis 0                  | (in, heads, out): axes 1 and 2                 |
    | 4    | (out, in, height, width): axis 0          | (height, width, in, out): the last axis        |
    | more | axis 0                                    | the last axis                                  |

    In JAX and NumPy, a leaf with at most one axis longer than 1 is one unit.

    Args:
        tree: dense arrays, as in `gradclip.clip_by_global_norm`.
        max_norm: the threshold of each unit, >= 0: a number or a scalar array. Or a prefix of `tree` that holds these,
            each for the units of all leaves below it.
        unit_axis: the axis or axes that index the units, instead of those in the table: 0 for the rows of a matrix, -1
            for its columns, (0, 1) for each kernel of (out, in, height, width). A leaf with fewer than two axes is one
            unit.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a unit contains NaN or infinity, as in `gradclip.clip_by_global_norm`. Other units are
            clipped as usual.

    Returns:
        `(clipped, norms)`: the new tree, and the norms of the units before clipping. Each array of norms has the shape
        of the axes that index the units: (out,) for a PyTorch leaf of shape (out, in). An integer leaf has one norm, 0.

    Raises:
        ValueError: a leaf has no axis `unit_axis`, or `max_norm` is not a prefix of `tree`.
        TypeError: a leaf is sparse. Other errors are those of `gradclip.clip_by_global_norm`.

    >>> import numpy as np
    >>> clipped, norms = clip_by_unit_norm(np.array([[3.0, 0.3], [4.0, 0.4]]), 1.0)
    >>> clipped.round(6).tolist(), norms.tolist()
    ([[0.6, 0.3], [0.8, 0.4]], [5.0, 0.5])
    >>> clip_by_unit_norm(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0, unit_axis=0)[1].tolist()
    [5.0, 0.5]

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    flat = counted(tree)
    leaves, norms = clip_units(flat, thresholds_of_leaves(flat, max_norm), clipping, scopes_of(flat, unit_axis))
    return flat.rebuild(leaves), norms


@with_subnormals
def adaptive_grad_clip(
    tree: Tree,
    params: object,
    clipping: Threshold = 0.01,
    eps: Threshold = 1e-3,
    *,
    unit_axis: UnitAxis = None,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
) -> tuple[Tree, Any]:
    """Clip each unit of the gradients to clipping * max(norm of the same unit of the parameters, eps).

    Args:
        tree: the gradients. Units are those of `clip_by_unit_norm`.
        params: the parameters, a tree with the same structure and shapes; dtypes may differ. Beside integers among the
            gradients they may hold anything, or nothing. If a unit of the
            parameters contains NaN, its gradient becomes NaN. The result is differentiable with respect to `params`. In
            PyTorch, pass `.detach()`-ed parameters or use `torch.no_grad()` if you do not need this.
        clipping: the largest allowed ratio of gradient norm to parameter norm, >= 0; `inf` clips nothing.
        eps: a lower limit for the parameter norm, >= 0, so that parameters initialized to zero can move.
        unit_axis: as in `clip_by_unit_norm`.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a unit of the gradients contains NaN or infinity, as in `clip_by_unit_norm`.

    Returns:
        `(clipped, norms)`: the new tree, and the norms of the gradients' units before clipping. In exact arithmetic, no
        unit of the result exceeds clipping * max(norm, eps), where norm is the exact norm of the parameters' unit. A
        unit stays bit-identical if its norm is below that threshold by more than the rounding error.

    Raises:
        ValueError: the trees or shapes differ, or `clipping` or `eps` is negative. Other errors are those of
            `clip_by_unit_norm`.

    This is AGC of Brock, De, Smith and Simonyan 2021, "High-Performance Large-Scale Image Recognition Without
    Normalization", as in `optax` and `timm`; timm leaves out the parameters of the last layer.

    >>> import numpy as np
    >>> params = {"w": np.array([[6.0, 60.0], [8.0, 80.0]])}
    >>> grads = {"w": np.array([[3.0, 0.3], [4.0, 0.4]])}
    >>> clipped, norms = adaptive_grad_clip(grads, params, clipping=0.1)
    >>> clipped["w"].round(6).tolist(), norms["w"].tolist()
    ([[0.6, 0.3], [0.8, 0.4]], [5.0, 0.5])

    """
    asked = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    flat = counted(tree)
    return _clipped_adaptively(flat, params, (clipping, eps), asked, scopes_of(flat, unit_axis))


@with_subnormals
def clip_adaptively(
    tree: Tree, params: object, clipping: Threshold, eps: Threshold, *, shared_axes: UnitAxis
) -> tuple[Tree, Any]:
    """Do the same as `adaptive_grad_clip`, given the axes of each leaf along which elements share a norm."""
    asked = Clipping(None, EUCLIDEAN, PROPAGATE, CLIP)
    flat = counted(tree)
    scopes = scopes_of(flat, None) if shared_axes is None else scopes_beside(flat, shared_axes)
    return _clipped_adaptively(flat, params, (clipping, eps), asked, scopes)


def _clipped_adaptively(
    flat: FlatTree, params: object, both: tuple[Threshold, Threshold], asked: Clipping, scopes: Sequence[Scope]
) -> tuple[Any, Any]:
    leaves, norms = clip_units_adaptively(flat, parameters_beside(flat, params), both, asked, scopes)
    return flat.rebuild(leaves), norms


@in_place
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
    advice = _NOT_DISTRIBUTED.format("clip_by_unit_norm")
    params, taken = checked(parameters, flatten(max_norm).leaves, "clip_grad_unit_norm_", advice)
    if params.tree is not None and not is_single_threshold(max_norm):
        flat = counted(params.tree)
        max_norm = flat.arrange(thresholds_of_leaves(flat, max_norm), 0.0)
    layers = Layerwise.of(params, max_norm, taken.backend, taken.gradients)
    return _clip(taken, layers, Each(layers.thresholds), clipping, unit_axis)


@in_place
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
    scalars, advice = [whole_scalar(clipping), whole_scalar(eps)], _NOT_DISTRIBUTED.format("adaptive_grad_clip")
    params, taken = checked(parameters, scalars, "adaptive_grad_clip_", advice)
    adaptive, given = adaptive_of(taken.backend, clipping, eps)
    layers = Layerwise.of(params, 0.0, taken.backend, taken.gradients)
    beside = _beside(taken, layers, weights_of(params, weights))
    if taken.backend.concrete:
        adaptive, given = Adaptive(adaptive.known), []
    return _clip(taken, layers, Following(adaptive, beside, given), asked, unit_axis)


_NOT_DISTRIBUTED = (
    "To clip by unit, call gradclip.{}, which returns new tensors; to clip by the global norm, call "
    "gradclip.clip_grad_norm_."
)


def _beside(taken: Taken, layers: Layerwise, weights: Mapping[int, Any]) -> Arrays:
    """Return the weights of the layers, given by owner. Raises if one is no array or has another shape."""
    mine = taken.gradients.chosen([index for (index,) in layers.groups.groups])
    chosen = [weights[id(owner)] for owner in mine.owners]
    find([*mine.grads, *chosen], lambda: with_parameters(mine.names()))
    check_shapes(mine.grads, chosen, mine.names)
    return taken.backend.enter(list(map(taken.backend.prepare, chosen)))


def _clip(
    taken: Taken, layers: Layerwise, thresholds: Each | Following, clipping: Clipping, unit_axis: UnitAxis
) -> Any:
    """Measure all gradients, then clip them; return their norms in the caller's structure."""
    mine = taken.chosen([index for (index,) in layers.groups.groups])
    grads = mine.gradients.grads
    layout = Rows(scopes_of_leaves(grads, mine.gradients.names, unit_axis), list(map(shape_of, grads)))
    with taken.backend.precision():
        return layers.arranged(clip_parts(mine, layout, thresholds, clipping))
