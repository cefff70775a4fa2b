"""Functional clipping, of whole trees and of units: returns new trees and never changes its input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack, overload

from gradclip._src.annotations import (
    Array,
    AxisName,
    ClipsShards,
    Integers,
    JaxTree,
    Leaves,
    NumPyArray,
    NumPyScalar,
    NumPyTree,
    OfShards,
    Ord,
    Policy,
    Scalar,
    Tensor,
    Threshold,
    Thresholds,
    TorchTree,
    Tree,
    UnitAxis,
    Where,
)
from gradclip._src.backends.registry import find
from gradclip._src.core.decision import Clipping
from gradclip._src.core.derivative import ValueRule
from gradclip._src.core.layouts import LAYER
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import EUCLIDEAN, Order
from gradclip._src.core.rules import CLIP
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.driver import (
    clip_adaptively_by_scopes,
    clip_groups,
    clip_units,
    clip_units_adaptively,
    leaves_of,
    norms_of_groups,
)
from gradclip._src.passed.arguments import check_real, check_threshold, is_single_threshold, scalar_array
from gradclip._src.passed.leaves import choice_of, counted, layers_of, prepared, split_by
from gradclip._src.passed.unit_axes import (
    parameters_beside,
    scopes_beside,
    scopes_of,
    thresholds_of_leaves,
)
from gradclip._src.public import public


@overload
def global_norm(tree: Leaves[NumPyArray], ord: Ord | Order = 2, **options: Unpack[OfShards]) -> NumPyScalar: ...
@overload
def global_norm(tree: Leaves[Tensor], ord: Ord | Order = 2, **options: Unpack[OfShards]) -> Tensor: ...
@overload
def global_norm(tree: Leaves[Array], ord: Ord | Order = 2, **options: Unpack[OfShards]) -> Array: ...
@overload
def global_norm(tree: object, ord: Ord | Order = 2, **options: Unpack[OfShards]) -> Scalar: ...
@public
@with_subnormals
def global_norm(
    tree: object, ord: Ord | Order = 2, *, axis_name: AxisName = None, where: Where = None, integers: Integers = "keep"
) -> Scalar:
    """Return the norm of all leaves of `tree` as one vector: (sum |x|**p)**(1/p).

    Args:
        tree: arrays of one framework in nested containers, or a single array; any shapes. A leaf that occurs twice
            counts twice (`gradclip.grad_norm` counts a parameter once). `None` leaves are skipped. Integers, booleans
            and JAX's `float0` do not count. Sparse arrays of JAX (BCOO, BCSR) count by their elements; entries with the
            same index are summed first, in float64.
        ord: p: a number >= 1, `inf` for the largest magnitude, `-inf` for the smallest; None means 2.
        axis_name: inside `jax.shard_map`, the mesh axis (or tuple of axes) over which the leaves are sharded. The norm
            is then that of all shards together, computed with one reduction, and `ord` must be at most 8 or infinite.
            With `check_vma=True`, a leaf replicated over an axis counts once. Otherwise every leaf counts as sharded.
        where: the leaves that count, by name: a pattern such as "encoder.*", a list of patterns, or a function that
            says of a name, such as "encoder.0.weight", whether it counts. All others come back as they are, like
            integers. Patterns that match no name are a ValueError.
        integers: "keep" leaves integers as they are. "raise" is a TypeError that names those that would count.

    Returns:
        A scalar of the framework on the first leaf's device: float64 if a leaf is float64, else float32. Its relative
        error is at most 1e-6 (float32 and narrower leaves) or 1e-14 (float64). It is 0 for a tree without elements, NaN
        or inf if an element is, and inf if the norm exceeds the scalar's range.

    Raises:
        TypeError: a leaf is not an array, the leaves belong to different frameworks, or all numbers are integers.
        ValueError: `ord` is not one of the values above, or `where` matches no name.

    >>> import numpy as np
    >>> float(global_norm({"w": np.array([3.0]), "b": np.array([4.0])}))
    5.0

    """
    order = Order.parse(ord)
    return norms_of_groups(leaves_of(tree, axis_name, where, integers), LAYER, order, axis_name)[0]


@public
@with_subnormals
def layer_norms(
    tree: object,
    ord: Ord = 2,
    *,
    prefix: object = None,
    axis_name: AxisName = None,
    where: Where = None,
    integers: Integers = "keep",
) -> Any:
    """Return the norm of each layer of `tree`: of each leaf, or of each group of leaves that `prefix` defines.

    Args:
        tree: as in `global_norm`.
        ord: which norm, as in `global_norm`.
        prefix: defines the layers, like the thresholds of `clip_by_layer_norm`: a prefix of `tree` whose leaves may be
            anything. All leaves of `tree` below one leaf of `prefix` form a layer. With None, each leaf is a layer.
        axis_name: as in `global_norm`.
        where: which leaves count, as in `global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        A tree of norms with the structure of `prefix`, or of `tree` without one. Dtypes and errors are those of
        `global_norm`. The norm of a layer of which nothing counts is 0, in float32.

    >>> import numpy as np
    >>> norms = layer_norms({"w": np.array([3.0, 4.0]), "b": np.array([-2.0])})
    >>> float(norms["w"]), float(norms["b"])
    (5.0, 2.0)

    """
    order, leaves = Order.parse(ord), leaves_of(tree, axis_name, where, integers)
    shape, layers = layers_of(leaves.flat) if prefix is None else split_by(leaves.flat, prefix, "prefix")
    return shape.arrange(norms_of_groups(leaves, layers, order, axis_name))


@overload
def clip_by_global_norm(
    tree: NumPyTree, max_norm: Threshold, **options: Unpack[ClipsShards]
) -> tuple[NumPyTree, NumPyScalar]: ...
@overload
def clip_by_global_norm(
    tree: TorchTree, max_norm: Threshold, **options: Unpack[ClipsShards]
) -> tuple[TorchTree, Tensor]: ...
@overload
def clip_by_global_norm(
    tree: JaxTree, max_norm: Threshold, **options: Unpack[ClipsShards]
) -> tuple[JaxTree, Array]: ...
@overload
def clip_by_global_norm(tree: Tree, max_norm: Threshold, **options: Unpack[ClipsShards]) -> tuple[Tree, Scalar]: ...
@public
@with_subnormals
def clip_by_global_norm(
    tree: Tree,
    max_norm: Threshold,
    *,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    axis_name: AxisName = None,
    where: Where = None,
    integers: Integers = "keep",
) -> tuple[Tree, Scalar]:
    """Scale `tree` by min(1, max_norm / ||tree||). The result's norm never exceeds `max_norm`, even by rounding.

    Args:
        tree: arrays of one framework in nested containers, or a single array; any shapes, dtypes may be mixed. A leaf
            that occurs twice counts twice and is returned clipped in both places. Integers and booleans come back as
            they are and do not count.
        max_norm: the threshold, >= 0, in the units of the gradients: a number or a scalar array. `inf` clips nothing. A
            negative value raises ValueError, but counts as 0 in an array that is traced or on an accelerator.
        ord: which norm, as in `global_norm`.
        nonfinite: what to do if the gradients contain NaN or infinity. "propagate": everything becomes NaN. "raise":
            FloatingPointError; not in traced calls. "zero": they count as 0. "drop": everything becomes 0.
        axis_name: the mesh axes over which the leaves are sharded, as in `global_norm`.
        where: which leaves count, as in `global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        `(clipped, norm)`: a new tree with the same structure, dtypes, shapes and devices, and the norm before clipping,
        as `global_norm` returns it. If the norm is at most `max_norm`, the elements are bit-identical. Within rounding
        error of it, that holds where exact arithmetic decides: always for order 2 outside of traced calls and
        accelerators; otherwise see "Norms near the threshold" in the documentation. Sparse arrays of JAX keep their
        indices.

    Raises:
        TypeError, ValueError: as in `global_norm`, or an invalid `max_norm` or `nonfinite`.
        FloatingPointError: with `nonfinite="raise"`, the gradients contain NaN or infinity.

    The method is that of Pascanu et al. 2013. That the bound holds, rounding included, is proven.

    >>> import numpy as np
    >>> grads = {"w": np.array([3.0, 4.0])}
    >>> clipped, norm = clip_by_global_norm(grads, max_norm=1.0)
    >>> clipped["w"].round(6).tolist(), float(norm)
    ([0.6, 0.8], 5.0)

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    leaves = leaves_of(tree, axis_name, where, integers)
    clipped, norms = clip_groups(leaves, LAYER, [max_norm], clipping, axis_name)
    return leaves.rebuild(clipped), norms[0]


@public
@with_subnormals
def clip_by_layer_norm(
    tree: Tree,
    max_norm: Thresholds,
    *,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    axis_name: AxisName = None,
    where: Where = None,
    integers: Integers = "keep",
) -> tuple[Tree, Any]:
    """Clip each layer of `tree` by its own norm.

    Args:
        tree: as in `clip_by_global_norm`.
        max_norm: a number, the threshold of each leaf. Or a prefix of `tree` (its containers, cut off at any depth)
            that holds numbers: the leaves below one number form a layer, which is clipped to that threshold. It may
            leave out leaves that do not count.
        ord: which norm, as in `global_norm`.
        nonfinite: what to do if a layer contains NaN or infinity, as in `clip_by_global_norm`.
        axis_name: the mesh axes over which the leaves are sharded, as in `global_norm`.
        where: which leaves count, as in `global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        `(clipped, norms)`: the new tree and the norms before clipping. `norms` has the structure of `tree` if
        `max_norm` is a number, else that of `max_norm`.

    Raises:
        ValueError: `max_norm` is not a prefix of `tree`. Other errors are those of `clip_by_global_norm`.

    >>> import numpy as np
    >>> tree = {"w": np.array([3.0, 4.0]), "b": np.array([0.5])}
    >>> clipped, norms = clip_by_layer_norm(tree, 1.0)
    >>> clipped["w"].round(6).tolist(), clipped["b"].tolist(), float(norms["w"])
    ([0.6, 0.8], [0.5], 5.0)

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    leaves = leaves_of(tree, axis_name, where, integers)
    if is_single_threshold(max_norm):
        prefix, layers = layers_of(leaves.flat)
        thresholds = [max_norm] * layers.count
    else:
        prefix, layers = split_by(leaves.flat, max_norm)
        thresholds = prefix.leaves
    clipped, norms = clip_groups(leaves, layers, thresholds, clipping, axis_name)
    return leaves.rebuild(clipped), prefix.arrange(norms)


@public
@with_subnormals
def clip_by_value(tree: Tree, clip_value: Threshold, *, where: Where = None, integers: Integers = "keep") -> Tree:
    """Return `tree` alone, without a norm, each element clamped to [-clip_value, clip_value]. NaN stays NaN.

    Args:
        tree: arrays of real numbers, as in `clip_by_global_norm`. Integers come back as they are.
        clip_value: the largest magnitude, >= 0. If a leaf's dtype cannot represent it, it is rounded toward zero.
        where: which leaves count, as in `global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        A new tree with the same structure, dtypes, shapes and devices.

    Raises:
        TypeError: a leaf is complex; complex numbers have no order.
        ValueError: `clip_value` is negative or NaN.

    >>> import numpy as np
    >>> clip_by_value(np.array([-3.0, 0.5, 4.0]), 1.0).tolist()
    [-1.0, 0.5, 1.0]

    """
    flat = counted(tree, choice_of(where, integers))
    backend = find(flat.leaves, flat.paths, clip_value)
    bound = check_threshold(clip_value, "clip_value", backend=backend)
    arrays = prepared(backend, flat)
    check_real(arrays, flat.paths)

    own = bound if isinstance(bound, float) else None
    patterns = backend.types_of(flat.leaves)

    def primal(leaves: Sequence[Any], given: Any, _: None) -> tuple[list[Any], None, list[Any]]:
        clamped = backend.clamp(backend.enter(leaves), given if own is None else own)
        return backend.leave_all(clamped, patterns), None, []

    clip = backend.differentiable(primal, ValueRule(own))
    return flat.rebuild(clip(arrays, scalar_array(clip_value), None)[0])


@public
@with_subnormals
def clip_by_unit_norm(
    tree: Tree,
    max_norm: Thresholds,
    *,
    unit_axis: UnitAxis = None,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    axis_name: AxisName = None,
    where: Where = None,
    integers: Integers = "keep",
) -> tuple[Tree, Any]:
    """Scale each unit of each leaf by min(1, max_norm / its own norm). A unit is the part that produces one output.

    The axes that index the outputs depend on the framework's layout, so the units do too:

    | axes | PyTorch, and MLX with its inputs last     | JAX, NumPy and TensorFlow, as optax            |
    |------|-------------------------------------------|------------------------------------------------|
    | 0, 1 | the whole leaf                            | the whole leaf                                 |
    | 2    | each row of (out, in): axis 0             | each column of (in, out): axis 1               |
    | 3    | (out, in, width): axis 0                  | (in, heads, out): axes 1 and 2                 |
    | 4    | (out, in, height, width): axis 0          | (height, width, in, out): the last axis        |
    | more | axis 0                                    | the last axis                                  |

    In JAX, NumPy and TensorFlow, a leaf with at most one axis longer than 1 is one unit.

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
        axis_name: inside `jax.shard_map`, the mesh axes over which the elements of each unit are sharded, as in
            `gradclip.global_norm`. Leave it out where each device holds whole units, such as rows.
        where: which leaves count, as in `gradclip.global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        `(clipped, norms)`: the new tree, and the norms of the units before clipping. Each array of norms has the shape
        of the axes that index the units: (out,) for a PyTorch leaf of shape (out, in). A leaf that does not
            count has one norm, 0.

    Raises:
        ValueError: a leaf has no axis `unit_axis`, or `max_norm` is not a prefix of `tree`. Without `unit_axis`: the
            part of a leaf on a device has at most one axis longer than 1, so it does not show the units.
        TypeError: a leaf is sparse. Other errors are those of `gradclip.clip_by_global_norm`.

    >>> import numpy as np
    >>> clipped, norms = clip_by_unit_norm(np.array([[3.0, 0.3], [4.0, 0.4]]), 1.0)
    >>> clipped.round(6).tolist(), norms.tolist()
    ([[0.6, 0.3], [0.8, 0.4]], [5.0, 0.5])
    >>> rows = np.array([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_by_unit_norm(rows, 1.0, unit_axis=0)[1].tolist()
    [5.0, 0.5]

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    leaves = leaves_of(tree, axis_name, where, integers)
    thresholds = partial(thresholds_of_leaves, max_norm=max_norm)
    clipped, norms = clip_units(leaves, thresholds, clipping, unit_axis, axis_name)
    return leaves.rebuild(clipped), norms


@public
@with_subnormals
def adaptive_grad_clip(
    tree: Tree,
    params: object,
    *,
    clipping: Threshold = 0.01,
    eps: Threshold = 1e-3,
    unit_axis: UnitAxis = None,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    axis_name: AxisName = None,
    where: Where = None,
    integers: Integers = "keep",
) -> tuple[Tree, Any]:
    """Clip each unit of the gradients to clipping * max(norm of the same unit of the parameters, eps).

    Args:
        tree: the gradients. Units are those of `clip_by_unit_norm`.
        params: the parameters, a tree with the same structure and shapes; dtypes may differ. Beside gradients
            that do not count they may hold anything, or nothing. If a unit of the parameters contains NaN, its gradient
            becomes NaN. The result is differentiable with respect to `params`. In
            PyTorch, pass `.detach()`-ed parameters or use `torch.no_grad()` if you do not need this.
        clipping: the largest allowed ratio of gradient norm to parameter norm, >= 0; `inf` clips nothing.
        eps: a lower limit for the parameter norm, >= 0, so that parameters initialized to zero can move. With `inf`,
            only a `clipping` of 0 clips.
        unit_axis: as in `clip_by_unit_norm`.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do if a unit of the gradients contains NaN or infinity, as in `clip_by_unit_norm`.
        axis_name: the mesh axes over which each unit is sharded, in gradients and parameters, as there.
        where: which leaves count, as in `gradclip.global_norm`.
        integers: "raise" refuses integers, as there.

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
    leaves = leaves_of(tree, axis_name, where, integers)
    beside = parameters_beside(leaves.flat, params)
    clipped, norms = clip_units_adaptively(leaves, beside, (clipping, eps), asked, unit_axis, axis_name)
    return leaves.rebuild(clipped), norms


@with_subnormals
def clip_adaptively(
    tree: Tree, params: object, clipping: Threshold, eps: Threshold, *, shared_axes: UnitAxis
) -> tuple[Tree, Any]:
    """Do the same as `adaptive_grad_clip`, given the axes of each leaf along which elements share a norm."""
    asked = Clipping(None, EUCLIDEAN, PROPAGATE, CLIP)
    flat = counted(tree)
    scopes = scopes_of(flat, None) if shared_axes is None else scopes_beside(flat, shared_axes)
    leaves, norms = clip_adaptively_by_scopes(flat, parameters_beside(flat, params), (clipping, eps), asked, scopes)
    return flat.rebuild(leaves), norms
