"""Functional clipping of units: the parts of a layer that lead to one output each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradclip.arguments import is_single_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.core.decide import Clipping
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import EUCLIDEAN, Order
from gradclip.core.rules import CLIP
from gradclip.core.scopes import Scope
from gradclip.layers.units import clip_units, clip_units_adaptively, parameters_beside, scopes_beside, scopes_of
from gradclip.tree import FlatTree, flatten
from gradclip.typing import Ord, Policy, Threshold, Thresholds, Tree, UnitAxis


@ordinary_arithmetic
def clip_by_unit_norm(
    tree: Tree, max_norm: Thresholds, *, unit_axis: UnitAxis = None, ord: Ord = 2, nonfinite: Policy = "propagate"
) -> tuple[Tree, Any]:
    """Scale each unit of each leaf by min(1, max_norm / its own norm): what leads to one output of a layer.

    Where the outputs lie differs from framework to framework, and so does what is a unit:

    | axes | PyTorch                                   | JAX and NumPy, as optax                        |
    |------|-------------------------------------------|------------------------------------------------|
    | 0, 1 | the whole leaf                            | the whole leaf                                 |
    | 2    | each row of (out, in): axis 0             | each column of (in, out): axis 1               |
    | 3    | (out, in, width): axis 0                  | (in, heads, out): axes 1 and 2                 |
    | 4    | (out, in, height, width): axis 0          | (height, width, in, out): the last axis        |
    | more | axis 0                                    | the last axis                                  |

    In JAX and NumPy a leaf with at most one axis longer than 1 is one unit.

    Args:
        tree: dense arrays as in `gradclip.clip_by_global_norm`.
        max_norm: the threshold of each unit, >= 0: a number or scalar array, or a prefix of `tree` that holds such,
            each for the units of all leaves below it.
        unit_axis: the axis or axes along which units lie in leaves of two axes and more, in place of the table: 0 for
            rows of a matrix, -1 for columns, (0, 1) for each kernel of (out, in, height, width). Shorter leaves are one
            unit.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do with NaN and infinities in a unit, as in `gradclip.clip_by_global_norm`. The other units
            are clipped as ever.

    Returns:
        `(clipped, norms)`: the new tree, and the norms of units before clipping, arrays shaped as the axes along which
        the units lie: for a leaf of shape (out, in) in PyTorch the shape (out,).

    Raises:
        ValueError: a leaf lacks `unit_axis`, `max_norm` is no prefix. TypeError: a sparse leaf. Others as in
        `gradclip.clip_by_global_norm`.

    >>> import numpy as np
    >>> clipped, norms = clip_by_unit_norm(np.array([[3.0, 0.3], [4.0, 0.4]]), 1.0)
    >>> clipped.round(6).tolist(), norms.tolist()
    ([[0.6, 0.3], [0.8, 0.4]], [5.0, 0.5])
    >>> clip_by_unit_norm(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0, unit_axis=0)[1].tolist()
    [5.0, 0.5]

    """
    clipping = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    flat = flatten(tree)
    thresholds = [max_norm] * len(flat.leaves)
    if not is_single_threshold(max_norm):
        prefix, groups = flat.split_by(max_norm)
        for threshold, group in zip(prefix.leaves, groups, strict=True):
            for index in group:
                thresholds[index] = threshold
    leaves, norms = clip_units(flat, thresholds, clipping, scopes_of(flat, unit_axis))
    return flat.rebuild(leaves), flat.arrange(norms)


@ordinary_arithmetic
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
        tree: gradients, and what is a unit of them, as in `clip_by_unit_norm`.
        params: the parameters, a tree of the same structure and shapes; dtypes may differ. Where one holds NaN, the
            gradient of its unit becomes NaN. Derivatives go through them: in PyTorch pass what needs none by
            `.detach()`, or call under `torch.no_grad()`.
        clipping: how large a gradient may be beside its parameter, >= 0; `inf` clips nothing.
        eps: what a unit's norm counts as at least, >= 0, so that parameters that start as zeros can move.
        unit_axis: as in `clip_by_unit_norm`.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do with NaN and infinities in a unit of the gradients, as in `clip_by_unit_norm`.

    Returns:
        `(clipped, norms)`: the new tree, and the norms of the gradients' units before clipping. In exact arithmetic
        no unit of the result exceeds clipping * max(norm, eps), norm being the exact one of the parameters' unit. A
        unit whose norm is below that by more than rounding can make out stays bit for bit.

    Raises:
        ValueError: trees or shapes that differ, a negative `clipping` or `eps`. Others as in `clip_by_unit_norm`.

    This is AGC of Brock, De, Smith and Simonyan 2021, "High-Performance Large-Scale Image Recognition Without
    Normalization", as `optax` and `timm` have it; timm leaves out the parameters of the last layer.

    >>> import numpy as np
    >>> params = {"w": np.array([[6.0, 60.0], [8.0, 80.0]])}
    >>> grads = {"w": np.array([[3.0, 0.3], [4.0, 0.4]])}
    >>> clipped, norms = adaptive_grad_clip(grads, params, clipping=0.1)
    >>> clipped["w"].round(6).tolist(), norms["w"].tolist()
    ([[0.6, 0.3], [0.8, 0.4]], [5.0, 0.5])

    """
    asked = Clipping(None, Order.parse(ord), Nonfinite.named(nonfinite), CLIP)
    flat = flatten(tree)
    return _clipped_adaptively(flat, params, (clipping, eps), asked, scopes_of(flat, unit_axis))


@ordinary_arithmetic
def clip_adaptively(
    tree: Tree, params: object, clipping: Threshold, eps: Threshold, *, shared_axes: UnitAxis
) -> tuple[Tree, Any]:
    """Return what `adaptive_grad_clip` does, given the axes of every leaf along which elements share a norm."""
    asked = Clipping(None, EUCLIDEAN, PROPAGATE, CLIP)
    flat = flatten(tree)
    scopes = scopes_of(flat, None) if shared_axes is None else scopes_beside(flat, shared_axes)
    return _clipped_adaptively(flat, params, (clipping, eps), asked, scopes)


def _clipped_adaptively(
    flat: FlatTree, params: object, both: tuple[Threshold, Threshold], asked: Clipping, scopes: Sequence[Scope]
) -> tuple[Any, Any]:
    leaves, norms = clip_units_adaptively(flat, parameters_beside(flat, params), both, asked, scopes)
    return flat.rebuild(leaves), flat.arrange(norms)
