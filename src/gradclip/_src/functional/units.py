"""Clipping by unit: each part of a layer that produces one output has its own norm."""

from __future__ import annotations

from functools import partial
from typing import Any

from gradclip._src.core.decision import Clipping
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import EUCLIDEAN, Order
from gradclip._src.core.rules import CLIP
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.driver import clip_adaptively_by_scopes, clip_units, clip_units_adaptively, leaves_of
from gradclip._src.passed.leaves import counted
from gradclip._src.passed.unit_axes import (
    parameters_beside,
    scopes_beside,
    scopes_of,
    thresholds_of_leaves,
)
from gradclip.typing import Integers, Ord, Policy, Threshold, Thresholds, Tree, UnitAxis, Where


@with_subnormals
def clip_by_unit_norm(
    tree: Tree,
    max_norm: Thresholds,
    *,
    unit_axis: UnitAxis = None,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    where: Where = None,
    integers: Integers = "keep",
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
        where: which leaves count, as in `gradclip.global_norm`.
        integers: "raise" refuses integers, as there.

    Returns:
        `(clipped, norms)`: the new tree, and the norms of the units before clipping. Each array of norms has the shape
        of the axes that index the units: (out,) for a PyTorch leaf of shape (out, in). A leaf that does not
            count has one norm, 0.

    Raises:
        ValueError: a leaf has no axis `unit_axis`, or `max_norm` is not a prefix of `tree`.
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
    leaves = leaves_of(tree, None, where, integers)
    clipped, norms = clip_units(leaves, partial(thresholds_of_leaves, max_norm=max_norm), clipping, unit_axis)
    return leaves.rebuild(clipped), norms


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
    leaves = leaves_of(tree, None, where, integers)
    beside = parameters_beside(leaves.flat, params)
    clipped, norms = clip_units_adaptively(leaves, beside, (clipping, eps), asked, unit_axis)
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
