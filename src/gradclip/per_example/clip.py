"""Clip each example of a batch by its own norm, and sum: what private and federated training build on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradclip.arguments import check_mask, check_real, check_threshold, is_single_threshold, scalar_array, shape_of_mask
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.registry import find, ways_to_examples
from gradclip.backends.values import Array, shape_of
from gradclip.core.decide import Clipping
from gradclip.core.derivative import ClipRule
from gradclip.core.holders import ALONE
from gradclip.core.norms import Order, norm_dtype
from gradclip.core.rules import Target
from gradclip.core.scopes import EXAMPLE
from gradclip.per_example import fast_path
from gradclip.per_example.grid import grid_for
from gradclip.per_example.settings import PerExampleSettings
from gradclip.per_example.sums import Batch
from gradclip.tree import FlatTree, first_sparse, flatten
from gradclip.typing import Mask, Policy, RuleName, Scalar, Thresholds, Tree, WideDtype
from gradclip.wording import listed


class PerExampleInfo(NamedTuple):
    """What was clipped.

    `num_clipped`: how many examples had a norm above their threshold, an integer scalar. `norms`: the norm of each
    example before clipping, shape (batch,). With `per_layer` both are trees shaped as the gradients, and with a tree of
    thresholds as that.

    Both tell of single examples: noise that is scaled to the sum's sensitivity does not cover them. Neither publish
    them, nor choose thresholds by them, without noise of their own.
    """

    num_clipped: Scalar
    norms: Scalar


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
    """Return the sum over examples g_i of c_i * g_i, where c_i * ||g_i|| <= max_norm.

    | rule          | c_i                          |
    |---------------|------------------------------|
    | "clip"        | min(1, max_norm / ||g_i||)   |
    | "normalize"   | max_norm / ||g_i||           |
    | "automatic"   | max_norm / (||g_i|| + gamma) |

    Args:
        grads: a tree whose leaves all carry the batch on axis 0, shapes (batch, ...).
        max_norm: the threshold C of each example, >= 0, in the units of the gradients; or a prefix of `grads` that
            holds thresholds C_k, each for what lies below it.
        per_layer: clip each leaf of an example by its own norm, to C_k with sum C_k**2 = C**2.
        uniform: with `per_layer`, whether C_k is C / sqrt(K) for K leaves, or C * sqrt(D_k / D), D_k of the D
            elements of an example being in the leaf.
        mask: booleans of shape (batch,); where one is False the example is padding and contributes exactly zero,
            whatever it holds.
        nonfinite: what happens to an example with NaN or infinities, as in `gradclip.clip_by_global_norm`; "skip"
            makes its contribution exactly zero and leaves the other examples as they are.
        rule: one of the table. An example of zeros contributes zeros by each.
        gamma: > 0, in the units of the gradients; for "automatic" alone.
        sum_dtype: in what dtype sums are returned, "float32" or "float64" (or a framework's); None is float64 for
            float64 gradients and float32 for all others. Sums of complex gradients have parts of it.
        grid: how many steps `max_norm` is divided into: each clipped example is rounded to integer multiples of
            max_norm / grid, and sums are those of the integers, in int64: the same for every order and microbatch size.
            Multiply them by max_norm / grid, with `per_layer` too. One example more or less changes them by at most
            `grid`, exactly; what D elements are clipped to is sqrt(D) / 2 steps less. Each of several thresholds C_k
            has its own steps: multiply each sum by its own C_k / grid.
        to_unit: divide the sum by `max_norm`, so that each example contributes at most 1; not with `per_layer`.

    Returns:
        `(summed, info)`: a tree of sums, and a `PerExampleInfo`. Under every rule one example more or less changes
        the sum by at most max_norm (for thresholds C_k, by sqrt(sum C_k**2)), but for the rounding of the sum.

    Raises:
        ValueError: leaves without a common batch axis, a wrong mask, a negative or NaN `max_norm`, an unknown rule, a
        tree of thresholds that is no prefix, a `sum_dtype` narrower than float32, a grid too coarse for the number of
        elements (with the smallest that works), float64 or int64 where JAX's 64-bit mode is off. TypeError: leaves
        that are no arrays, complex ones on a grid. FloatingPointError: under "raise".

    Clipping is that of Abadi et al. 2016, "Deep Learning with Differential Privacy", by layers that of McMahan et al.
    2018, "Learning Differentially Private Recurrent Language Models"; "normalize" and "automatic" are AUTO-V and AUTO-S
    of Bu et al. 2023, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger".

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
    found = fast_path.clip_examples(grads, settings) if mask is None else None
    if found is not None:
        total, clipped, norms = found
        return total, PerExampleInfo(clipped, norms)
    return clip_examples(grads, settings, check_mask(mask))


def clip_examples(grads: Tree, settings: PerExampleSettings, mask: Mask) -> tuple[Tree, PerExampleInfo]:
    """Clip and add up examples as `per_example_clip` does; the mask has been checked."""
    flat = flatten(grads)
    plan = _Plan.of(flat, settings)
    backend = find(flat.leaves, flat.paths, *plan.thresholds, mask)
    backend.check_sum_dtype(settings.dtype_of_sums)
    prepared = [backend.prepare(leaf) for leaf in flat.leaves]
    check_batch(flat, flat.leaves, mask)
    return _Batch(backend, flat, prepared, mask, settings).clip_groups(plan)


@dataclass(frozen=True)
class _Plan:
    """Which leaves are clipped together, each group to a threshold times a share, and how results are arranged."""

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
        return cls(flat, [[i] for i in leaves], [threshold] * len(leaves), shares)


class _Batch:
    """A batch of per-example gradients whose leaves are clipped together or one by one."""

    def __init__(
        self, backend: Backend, flat: FlatTree, prepared: Sequence[Any], mask: Mask, settings: PerExampleSettings
    ) -> None:
        self.backend = backend
        self.flat = flat
        self.outline = replace(flat, leaves=list(backend.patterns(flat.leaves)), sparse={})
        self.prepared = prepared
        self.mask = None if mask is None else backend.booleans(mask)
        self.settings = settings

    def clip_groups(self, plan: _Plan) -> tuple[Any, PerExampleInfo]:
        """Clip each group of leaves; return the sums and what was clipped, in the plan's shape."""
        sums: dict[int, Any] = {}
        counts, norms = [], []
        for group, threshold, share in zip(plan.groups, plan.thresholds, plan.shares, strict=True):
            summed, norm, count = self.clip(group, threshold, share)
            sums.update(zip(group, summed, strict=True))
            counts.append(count)
            norms.append(norm)
        total = self.flat.rebuild([sums[i] for i in range(len(sums))])
        if plan.shape is None:
            return total, PerExampleInfo(counts[0], norms[0])
        return total, PerExampleInfo(plan.shape.arrange(counts), plan.shape.arrange(norms))

    def clip(self, indices: Sequence[int], threshold: object, share: float) -> tuple[list[Any], Any, Any]:
        """Clip the leaves at `indices` together; return their sums, the norms and the number clipped."""
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
    """Leaves that are clipped together, to a share of the threshold in `clipping`, or of one that is traced.

    It holds no traced array: JAX keeps what the functions of its rules hold.
    """

    backend: Backend
    outline: FlatTree
    indices: Sequence[int]
    clipping: Clipping
    share: float
    sum_dtype: str | None
    grid: int | None

    def clipped(self, prepared: Sequence[Any], max_norm: Any, mask: Array | None) -> tuple[list[Any], Any, list[Any]]:
        """Return the sums that have derivatives, the norms, and the number clipped with the other sums."""
        with self.backend.precision():
            arrays = self.backend.enter(prepared)
            own = self.clipping.max_norm
            threshold = self.backend.scalar(max_norm, arrays) if own is None else own
            sums, norms, count = self._summed(arrays, self._shared(threshold), mask)
            return ([], norms, [count, *sums]) if self.grid else (sums, norms, [count])

    def _summed(self, arrays: Arrays, threshold: float | Array, mask: Array | None) -> tuple[list[Any], Any, Any]:
        clipping = replace(self.clipping, max_norm=threshold)
        if self.grid is not None:
            check_real(arrays, self._names)
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
        """Return the share of a threshold, 0 where numbers are too coarse for it to be one."""
        if self.share == 1:
            return threshold
        shared, tiny = threshold * self.share, self.backend.wide.tiny
        if isinstance(shared, float):
            return 0.0 if shared < tiny else shared
        return self.backend.xp.where(shared < tiny, 0.0, shared)


def layer_shares(sizes: Sequence[int], *, uniform: bool) -> list[float]:
    """Return the share of the threshold that each layer gets: their squares add up to at most 1, exactly.

    Powers of two multiply a threshold exactly; other shares are lowered by more than all rounding can add.
    """
    total = sum(sizes)
    squares = [1.0 / len(sizes) if uniform or not total else size / total for size in sizes]
    shares = [math.sqrt(square) for square in squares]
    return [share if math.frexp(share)[0] in (0.0, 0.5) else share * (1.0 - 2.0**-50) for share in shares]


def check_batch(flat: FlatTree, leaves: Sequence[Any], mask: Mask) -> None:
    """Raise a ValueError where the leaves, or the mask, have no common batch axis; a TypeError for sparse leaves."""
    sparse = first_sparse(flat)
    if sparse is not None:
        place, kind, method = sparse
        raise TypeError(
            f"per-example gradients must be dense, got {kind} at {flat.paths()[place] or 'grads'}. Call {method} on it."
        )
    if not leaves:
        raise ValueError("grads holds no arrays; pass the gradients of each example, batch on axis 0.")
    shapes = list(map(shape_of, leaves))
    batch = shapes[0][:1]
    wrong = [i for i, shape in enumerate(shapes) if not shape or shape[:1] != batch]
    if wrong:
        paths = flat.paths()
        found = [f"{paths[i] or 'grads'} {shapes[i]}" for i in sorted({0, *wrong})]
        raise ValueError(
            f"every leaf must carry the batch on axis 0, with one length for all; the shapes are {listed(found)}. "
            f"Compute per-example gradients first, with {ways_to_examples()}."
        )
    if mask is not None and shape_of_mask(mask) != batch:
        raise ValueError(
            f"mask must have one boolean for each of the {batch[0]} examples, got shape {shape_of_mask(mask)}."
        )
