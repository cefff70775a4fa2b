"""Clip each example of a batch by its own norm and add them up, for private and federated training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree

from gradclip._src.annotations import Mask, Policy, RuleName, Scalar, Thresholds, Tree, WideDtype
from gradclip._src.backends.imported import exportable
from gradclip._src.backends.registry import find, framework_of, ways_to_examples
from gradclip._src.core.values import shape_of
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.look import known_threshold, read
from gradclip._src.passed.arguments import check_mask, is_single_threshold, shape_of_mask
from gradclip._src.passed.leaves import first_sparse, prepared, summed
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.private.sums.summed import LeafGroup, nothing, summed_at_once
from gradclip._src.public import public
from gradclip._src.tree import FlatTree, flattened
from gradclip._src.words import listed


@public
@exportable
class PerExampleInfo(NamedTuple):
    """How many examples were clipped, and the norm of each.

    Attributes:
        num_clipped: the number of examples with a norm above their threshold, an integer scalar.
        norms: the norm of each example before clipping, shape (batch,), float64 if a gradient is
            float64, else float32.

    With `per_layer`, both are trees with the structure of the gradients. With a tree of thresholds, they have the
    structure of that tree.

    Both reveal single examples. The noise on the sum does not protect them: add separate noise before you publish
    them or choose thresholds from them.
    """

    num_clipped: Scalar
    norms: Scalar


@public
@with_subnormals
def per_example_clip(
    grads: Tree,
    max_norm: Thresholds,
    *,
    per_layer: bool = False,
    uniform: bool = True,
    mask: Mask = None,
    nonfinite: Policy = "drop",
    rule: RuleName = "clip",
    gamma: float = 0.01,
    sum_dtype: WideDtype | None = None,
    grid: int | None = None,
    to_unit: bool = False,
) -> tuple[Tree, PerExampleInfo]:
    """Clip each example's gradient g_i by its own norm; return the sum of c_i * g_i, with c_i * ||g_i|| <= max_norm.

    | rule          | c_i                          |
    |---------------|------------------------------|
    | "clip"        | min(1, max_norm / ||g_i||)   |
    | "normalize"   | max_norm / ||g_i||           |
    | "automatic"   | max_norm / (||g_i|| + gamma) |

    Args:
        grads: a tree of per-example gradients. Every leaf carries the batch on axis 0, shape (batch, ...).
        max_norm: the threshold C of each example, >= 0, in the units of the gradients. Or a tree that is a prefix of
            `grads`: each threshold C_k in it clips the leaves below it together.
        per_layer: clip each leaf of an example by its own norm, to C_k. The C_k satisfy sum C_k**2 = C**2.
        uniform: how `per_layer` divides C. True: C_k = C / sqrt(K) for K leaves. False: C_k = C * sqrt(D_k / D), for
            D_k of an example's D elements in leaf k.
        mask: booleans of shape (batch,). False marks padding, which contributes exactly zero, whatever it holds.
        nonfinite: the policy for an example with NaN or infinities, as in `gradclip.clip_by_global_norm`. With "drop"
            it contributes exactly zero, and the other examples are unaffected. With `per_layer` or a tree of
            thresholds, this holds for each part of an example that has a norm of its own.
        rule: one of the table. An example of zeros contributes zeros under every rule.
        gamma: > 0, in the units of the gradients. Only "automatic" uses it.
        sum_dtype: the dtype of the sums: "float32", "float64", or a framework's own. None: float64 for float64
            gradients, otherwise float32. For complex gradients, the dtype of the real and imaginary parts.
        grid: sum on an integer grid with this many steps in `max_norm`. Each clipped example is rounded to multiples
            of max_norm / grid, and the sums are the sums of those integers, in int64. They are the same for every
            order and microbatch size. Multiply them by max_norm / grid, with `per_layer` as well. With several
            thresholds C_k, multiply each sum by its own C_k / grid. Adding or removing one example changes the
            integers by at most `grid`, exactly. To leave room for the rounding, an example of D elements is clipped
            to sqrt(D) / 2 steps less.
        to_unit: divide the sum by `max_norm`, so each example contributes at most 1. Not with `per_layer` or `grid`.

    Returns:
        `(summed, info)`: a tree of sums, and a `PerExampleInfo`. Under every rule, adding or removing one example
        changes the sum by at most max_norm (for thresholds C_k, by sqrt(sum C_k**2)), plus the rounding of the sum.
        `gradclip.clipped_sum_sensitivity` computes both.

    Raises:
        ValueError: leaves without a common batch axis, a mask of the wrong shape, a negative or NaN `max_norm`, an
        unknown rule, a tree of thresholds that is not a prefix, a `sum_dtype` narrower than float32, a grid too coarse
        for the number of elements (the error names the smallest that works), a grid with nonfinite="propagate"
        (integers cannot be NaN), float64 or int64 when JAX's 64-bit mode is off. TypeError: leaves that are not
        arrays, integers (left as they are, they would be public), complex leaves with a grid. FloatingPointError:
        under "raise".

    Clipping is from Abadi et al. 2016, "Deep Learning with Differential Privacy"; per-layer clipping from McMahan et
    al. 2018, "Learning Differentially Private Recurrent Language Models"; "normalize" and "automatic" are AUTO-V and
    AUTO-S of Bu et al. 2023, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger".

    >>> import numpy as np
    >>> grads = np.array([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])
    >>> summed, info = per_example_clip(grads, max_norm=1.0)
    >>> summed.round(6).tolist(), int(info.num_clipped), info.norms.tolist()
    ([0.9, 1.2], 1, [0.0, 5.0, 0.5])
    >>> per_example_clip(grads, max_norm=1.0, rule="normalize")[0].round(6).tolist()
    [1.2, 1.6]

    """
    settings = PerExampleSettings(
        max_norm,
        per_layer=per_layer,
        uniform=uniform,
        nonfinite=nonfinite,
        rule=rule,
        gamma=gamma,
        sum_dtype=sum_dtype,
        grid=grid,
        to_unit=to_unit,
    )
    return clip_examples(grads, settings, mask)


def clip_examples(grads: Tree, settings: PerExampleSettings, mask: Mask) -> tuple[Tree, PerExampleInfo]:
    """Clip and add up examples as `per_example_clip` does."""
    ordinary = _ordinary(grads, settings, mask)
    if ordinary is not None:
        return ordinary
    mask, flat = check_mask(mask), summed(grads)
    plan = Grouping.of(flat, settings)
    backend = find(flat.leaves, flat.paths, *plan.thresholds, mask)
    backend.check_sum_dtype(settings.dtype_of_sums)
    arrays = prepared(backend, flat)
    check_batch(flat, flat.leaves, mask)
    inside = None if mask is None else backend.booleans(mask)
    outline = flat.outline(backend.types_of(flat.leaves))
    sums: dict[int, Any] = {}
    counts, norms = [], []
    for indices, threshold, share in zip(plan.groups, plan.thresholds, plan.shares, strict=True):
        if indices:
            group = LeafGroup.of(backend, outline, indices, settings, share)
            made, norm, count = group.clip([arrays[i] for i in indices], threshold, inside)
        else:
            made, norm, count = nothing(backend, shape_of(flat.leaves[0])[:1], outline.leaves)
        sums.update(zip(indices, made, strict=True))
        counts.append(count)
        norms.append(norm)
    total = flat.rebuild([sums[i] for i in range(len(sums))])
    if plan.shape is None:
        return total, PerExampleInfo(counts[0], norms[0])
    return total, PerExampleInfo(plan.shape.arrange(counts), plan.shape.arrange(norms))


def _ordinary(grads: Tree, settings: PerExampleSettings, mask: Mask) -> tuple[Tree, PerExampleInfo] | None:
    """Clip and add up an ordinary batch, with fewer steps before the kernels; return None for any other batch.

    A batch is ordinary if the kernels read it, no derivative is asked for, and each example is clipped as a whole to a
    number.
    """
    if settings.per_layer or settings.grid is not None:
        return None
    leaves, structure = optree.tree_flatten(grads)
    given = read(leaves)
    if given is None or not len(leaves[0].shape) or len({leaf.shape[:1] for leaf in leaves}) > 1:
        return None
    max_norm = known_threshold(settings.max_norm)
    if max_norm is None or not (mask is None or _is_ordinary(mask, leaves[0])):
        return None
    with given.backend.precision():
        inside: Any = None if mask is None else given.backend.booleans(mask)
        made = summed_at_once(given, settings, float(max_norm), inside)
        if made is None:
            group = LeafGroup.of(given.backend, flattened(leaves, structure), range(len(leaves)), settings, 1.0)
            made = group.summed(given.arrays(), float(max_norm), inside)
    return optree.tree_unflatten(structure, made.sums), PerExampleInfo(made.clipped, made.norm)


def _is_ordinary(mask: Any, leaf: Any) -> bool:
    """Return whether a mask has a known boolean for each example, in a list or an array of the leaf's framework."""
    if isinstance(mask, list | tuple):
        return set(map(type, mask)) <= {bool} and (len(mask),) == leaf.shape[:1]
    framework = framework_of(mask) if type(mask) is type(leaf) else None
    known = framework is not None and framework.on_fast_path([mask]) is not None
    return known and "bool" in str(mask.dtype) and mask.shape == leaf.shape[:1]


@dataclass(frozen=True)
class Grouping:
    """Which leaves are clipped together, the threshold and share of each group, and the tree of the results."""

    shape: FlatTree | None
    groups: Sequence[Sequence[int]]
    thresholds: Sequence[Any]
    shares: Sequence[float]

    @classmethod
    def of(cls, flat: FlatTree, settings: PerExampleSettings) -> Grouping:
        leaves = range(len(flat.leaves))
        if not is_single_threshold(settings.max_norm):
            prefix, groups = flat.split_by(settings.max_norm)
            return cls(prefix, groups, prefix.leaves, [1.0] * len(groups))
        threshold = settings.max_norm
        if not settings.per_layer:
            return cls(None, [leaves], [threshold], [1.0])
        sizes = [math.prod(getattr(leaf, "shape", ())[1:]) for leaf in flat.leaves]
        shares = layer_shares(sizes, uniform=settings.uniform) if sizes else []
        shape, groups = flat.each_alone()
        of_leaf = iter(shares)
        return cls(shape, groups, [threshold] * len(groups), [next(of_leaf) if group else 1.0 for group in groups])


def layer_shares(sizes: Sequence[int], *, uniform: bool) -> list[float]:
    """Return each layer's share of the threshold. The squares of the shares add up to at most 1, exactly.

    Multiplying by a power of two is exact. Other shares are lowered by more than all rounding can add.
    """
    total = sum(sizes)
    squares = [1.0 / len(sizes) if uniform or not total else size / total for size in sizes]
    shares = [math.sqrt(square) for square in squares]
    return [share if math.frexp(share)[0] in (0.0, 0.5) else share * (1.0 - 2.0**-50) for share in shares]


def check_batch(flat: FlatTree, leaves: Sequence[Any], mask: Mask) -> None:
    """Raise a ValueError if leaves and mask do not share a batch axis, a TypeError for sparse leaves."""
    sparse = first_sparse(flat)
    if sparse is not None:
        place, kind, method = sparse
        raise TypeError(
            f"per-example gradients must be dense, got {kind} at {flat.paths()[place] or 'grads'}. Call {method} on it."
        )
    if not leaves:
        raise ValueError("grads holds no arrays. Pass per-example gradients, with the batch on axis 0.")
    shapes = list(map(shape_of, leaves))
    batch = shapes[0][:1]
    wrong = [i for i, shape in enumerate(shapes) if not shape or shape[:1] != batch]
    if wrong:
        paths = flat.paths()
        found = [f"{paths[i] or 'grads'} {shapes[i]}" for i in sorted({0, *wrong})]
        raise ValueError(
            f"every leaf must carry the batch on axis 0, all with the same length; the shapes are {listed(found)}. "
            f"Compute per-example gradients first, with {ways_to_examples()}."
        )
    if mask is not None and shape_of_mask(mask) != batch:
        raise ValueError(
            f"mask must have one boolean for each of the {batch[0]} examples, got shape {shape_of_mask(mask)}."
        )
