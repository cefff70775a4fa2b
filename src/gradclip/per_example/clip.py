"""Clip each example of a batch by its own norm and add them up, for private and federated training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradclip.arguments import check_mask, check_real, check_threshold, is_single_threshold, scalar_array, shape_of_mask
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends.registry import find, ways_to_examples
from gradclip.core.arrays import Arrays
from gradclip.core.decision import Clipping
from gradclip.core.derivative import ClipRule
from gradclip.core.holders import ALONE
from gradclip.core.norms import Order, norm_dtype
from gradclip.core.protocols import Backend
from gradclip.core.rules import Target
from gradclip.core.scopes import EXAMPLE
from gradclip.core.values import Array, shape_of
from gradclip.leaves import first_sparse, summed
from gradclip.per_example import fast_path
from gradclip.per_example.grid import grid_for
from gradclip.per_example.outputs import PerExampleInfo
from gradclip.per_example.settings import PerExampleSettings
from gradclip.per_example.sums import Batch
from gradclip.tree import FlatTree
from gradclip.typing import Mask, Policy, RuleName, Thresholds, Tree, WideDtype
from gradclip.wording import listed

_NOT_ON_A_GRID = (
    "cannot be rounded to a grid. Leave out grid, or pass its real and imaginary parts as two leaves, which have the "
    "same norm."
)


@ordinary_arithmetic
def per_example_clip(
    grads: Tree,
    max_norm: Thresholds,
    *,
    per_layer: bool = False,
    uniform: bool = True,
    mask: Mask = None,
    nonfinite: Policy = "skip",
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
        nonfinite: the policy for an example with NaN or infinities, as in `gradclip.clip_by_global_norm`. With "skip"
            it contributes exactly zero, and the other examples are unaffected.
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
    found = fast_path.clip_examples(grads, settings, mask)
    if found is not None:
        total, clipped, norms = found
        return total, PerExampleInfo(clipped, norms)
    return clip_examples(grads, settings, check_mask(mask))


def clip_examples(grads: Tree, settings: PerExampleSettings, mask: Mask) -> tuple[Tree, PerExampleInfo]:
    """Clip and add up examples as `per_example_clip` does. The mask is already checked."""
    flat = summed(grads)
    plan = _Plan.of(flat, settings)
    backend = find(flat.leaves, flat.paths, *plan.thresholds, mask)
    backend.check_sum_dtype(settings.dtype_of_sums)
    prepared = [backend.prepare(leaf) for leaf in flat.leaves]
    check_batch(flat, flat.leaves, mask)
    return _Batch(backend, flat, prepared, mask, settings).clip_groups(plan)


@dataclass(frozen=True)
class _Plan:
    """Which leaves are clipped together, the threshold and share of each group, and the tree of the results."""

    shape: FlatTree | None
    groups: Sequence[Sequence[int]]
    thresholds: Sequence[Any]
    shares: Sequence[float]

    @classmethod
    def of(cls, flat: FlatTree, settings: PerExampleSettings) -> _Plan:
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


class _Batch:
    """A batch of per-example gradients, with leaves clipped together or one by one."""

    def __init__(
        self, backend: Backend, flat: FlatTree, prepared: Sequence[Any], mask: Mask, settings: PerExampleSettings
    ) -> None:
        self.backend = backend
        self.flat = flat
        self.outline = flat.outline(backend.types_of(flat.leaves))
        self.prepared = prepared
        self.mask = None if mask is None else backend.booleans(mask)
        self.settings = settings

    def clip_groups(self, plan: _Plan) -> tuple[Any, PerExampleInfo]:
        """Clip each group of leaves; return the sums, and the `PerExampleInfo` in the plan's shape."""
        sums: dict[int, Any] = {}
        counts, norms = [], []
        for group, threshold, share in zip(plan.groups, plan.thresholds, plan.shares, strict=True):
            made, norm, count = self.clip(group, threshold, share) if group else self._of_nothing()
            sums.update(zip(group, made, strict=True))
            counts.append(count)
            norms.append(norm)
        total = self.flat.rebuild([sums[i] for i in range(len(sums))])
        if plan.shape is None:
            return total, PerExampleInfo(counts[0], norms[0])
        return total, PerExampleInfo(plan.shape.arrange(counts), plan.shape.arrange(norms))

    def _of_nothing(self) -> tuple[list[Any], Any, Any]:
        """Return what `clip` returns for no leaves."""
        backend, leaves = self.backend, self.outline.leaves
        with backend.precision():
            zeros = backend.zeros(shape_of(self.flat.leaves[0])[:1], ())
            return [], backend.leave_scalar(zeros, "float32", leaves), backend.leave_count(zeros > 0, leaves)

    def clip(self, indices: Sequence[int], threshold: object, share: float) -> tuple[list[Any], Any, Any]:
        """Clip the leaves at `indices` together; return their sums, the norms and the number of clipped examples."""
        known = check_threshold(threshold, backend=self.backend)
        own = known if isinstance(known, float) else None
        asked = Clipping(own, Order(2.0), self.settings.policy, self.settings.target)
        rule = ClipRule(asked.order, own, asked.nonfinite, asked.target, EXAMPLE, summed=True, share=share)
        dtype, grid = self.settings.dtype_of_sums, self.settings.grid
        group = _Group(self.backend, self.outline, indices, asked, share, dtype, grid)
        clip = self.backend.differentiable(group.clipped, rule)
        prepared = [self.prepared[i] for i in indices]
        sums, norms, (count, *integers) = clip(prepared, scalar_array(threshold), self.mask)
        return [*sums, *integers], norms, count


@dataclass(frozen=True)
class _Group:
    """Leaves that are clipped together, to a share of the threshold in `clipping`, or of a traced threshold.

    It must not hold a traced array: JAX keeps whatever its derivative rules hold.
    """

    backend: Backend
    outline: FlatTree
    indices: Sequence[int]
    clipping: Clipping
    share: float
    sum_dtype: str | None
    grid: int | None

    def clipped(self, prepared: Sequence[Any], max_norm: Any, mask: Array | None) -> tuple[list[Any], Any, list[Any]]:
        """Return differentiable sums, the norms, and a list of the number clipped and any integer sums."""
        with self.backend.precision():
            arrays = self.backend.enter(prepared)
            own = self.clipping.max_norm
            threshold = self.backend.scalar(max_norm, arrays) if own is None else own
            sums, norms, count = self._summed(arrays, self._shared(threshold), mask)
            return ([], norms, [count, *sums]) if self.grid else (sums, norms, [count])

    def _summed(self, arrays: Arrays, threshold: float | Array, mask: Array | None) -> tuple[list[Any], Any, Any]:
        clipping = replace(self.clipping, max_norm=threshold)
        if self.grid is not None:
            check_real(arrays, self._names, _NOT_ON_A_GRID)
            grid = grid_for(self.grid, arrays.sharing(EXAMPLE), arrays[0].shape[0], self.share)
            target = Target(grid.steps, clipping.target.gamma, grid.share, integers=True)
            clipping = replace(clipping, target=target)
        made = Batch(self.backend, arrays, clipping, self._names, ALONE).clip_and_sum(mask)
        sums = self.backend.leave_sums(made.sums, arrays, self.sum_dtype)
        leaves = [self.outline.leaves[i] for i in self.indices]
        norms = self.backend.leave_scalar(made.norm.product(), norm_dtype(arrays), leaves)
        return sums, norms, self.backend.leave_count(made.clipped, leaves)

    def _names(self) -> list[str]:
        paths = self.outline.paths()
        return [paths[i] for i in self.indices]

    def _shared(self, threshold: Any) -> Any:
        """Return the share of a threshold, or 0 if the product is subnormal."""
        if self.share == 1:
            return threshold
        shared, tiny = threshold * self.share, self.backend.wide.tiny
        if isinstance(shared, float):
            return 0.0 if shared < tiny else shared
        return self.backend.xp.where(shared < tiny, 0.0, shared)


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
