"""Clip each example of a batch by its own norm, and sum: what private and federated training build on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradclip.backends import Backend, find
from gradclip.backends.arrays import Arrays
from gradclip.clip import norm_dtype
from gradclip.coefficient import check_threshold, known_threshold
from gradclip.decision import Clipping, decide
from gradclip.norms import Order
from gradclip.policy import check_policy
from gradclip.tree import FlatTree, flatten


class PerExampleInfo(NamedTuple):
    """What was clipped.

    `num_clipped`: how many examples had a norm above their threshold, an integer scalar. `norms`: the norm of each
    example before clipping, shape (batch,). With `per_layer`, both are trees shaped as the gradients.
    """

    num_clipped: Any
    norms: Any


def per_example_clip(
    grads: Any,
    max_norm: Any,
    *,
    per_layer: bool = False,
    uniform: bool = True,
    mask: Any = None,
    nonfinite: str = "skip",
    to_unit: bool = False,
) -> tuple[Any, PerExampleInfo]:
    """Return the sum over examples g_i of min(1, max_norm / ||g_i||) * g_i.

    Args:
        grads: a tree whose leaves all carry the batch on axis 0, shapes (batch, ...).
        max_norm: the threshold C of each example, >= 0, in the units of the gradients.
        per_layer: clip each leaf of an example by its own norm, to C_k with sum C_k**2 = C**2.
        uniform: with `per_layer`, whether C_k is C / sqrt(K) for K leaves, or C * sqrt(D_k / D), D_k of the D
            elements of an example being in the leaf.
        mask: booleans of shape (batch,); where one is False the example is padding and contributes exactly zero,
            whatever it holds.
        nonfinite: what happens to an example with NaN or infinities, as in `gradclip.clip_by_global_norm`; "skip"
            makes its contribution exactly zero and leaves the other examples as they are.
        to_unit: divide the sum by `max_norm`, so that each example contributes at most 1; not with `per_layer`.

    Returns:
        `(summed, info)`: a tree of sums, in float32, or float64 for float64 gradients; and a `PerExampleInfo`.

    Raises:
        ValueError: leaves without a common batch axis, a wrong mask, a negative or NaN `max_norm`.
        TypeError: leaves that are no arrays. FloatingPointError: under "raise".

    The methods are those of Abadi et al. 2016, "Deep Learning with Differential Privacy", and, for layers, of
    McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models".

    >>> import numpy as np
    >>> grads = np.array([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])
    >>> summed, info = per_example_clip(grads, max_norm=1.0)
    >>> summed.round(6).tolist(), int(info.num_clipped), info.norms.tolist()
    ([0.9, 1.2], 1, [0.0, 5.0, 0.5])

    """
    if to_unit and per_layer:
        raise ValueError("to_unit=True is for one norm of an example; with per_layer=True divide the sum by max_norm.")
    flat, asked = flatten(grads), Clipping(None, Order(2.0), check_policy(nonfinite), to_unit)
    threshold = check_threshold(max_norm)
    backend = find(flat.leaves, flat.paths, threshold, mask)
    threshold = known_threshold(backend, threshold)
    prepared = [backend.prepare(leaf) for leaf in flat.leaves]
    check_batch(flat, prepared, mask)
    with backend.precision():
        batch = _Batch(backend, flat, backend.enter(prepared), mask, asked)
        if not per_layer:
            sums, count, norms = batch.clip(range(len(prepared)), threshold)
            return flat.rebuild(sums), PerExampleInfo(count, norms)
        shares = layer_shares([math.prod(x.shape[1:]) for x in prepared], uniform=uniform)
        each = [batch.clip([i], threshold, share) for i, share in enumerate(shares)]
    sums, counts, norms = ([entry[k] for entry in each] for k in range(3))
    info = PerExampleInfo(flat.rebuild(counts), flat.rebuild(norms))
    return flat.rebuild([s[0] for s in sums]), info


class _Batch:
    """A batch of per-example gradients whose leaves are clipped together or one by one."""

    def __init__(self, backend: Backend, flat: FlatTree, arrays: Arrays, mask: Any, asked: Clipping) -> None:
        self.backend = backend
        self.flat = flat
        self.arrays = arrays
        self.mask = None if mask is None else backend.booleans(mask)
        self.asked = asked

    def clip(self, indices: Sequence[int], max_norm: Any, share: float = 1.0) -> tuple[list[Any], Any, Any]:
        """Clip the leaves at `indices` together; return their sums, the number clipped and the norms."""
        backend = self.backend
        arrays = Arrays([self.arrays[i] for i in indices])
        leaves = [self.flat.leaves[i] for i in indices]
        threshold = backend.scalar(max_norm, arrays) * share
        made = decide(
            backend,
            arrays,
            replace(self.asked, max_norm=threshold),
            lambda: [self.flat.paths()[i] for i in indices],
            batched=True,
            mask=self.mask,
        )
        sums = [backend.leave_sum(backend.weighted_sum(x, made.coefficient), x) for x in made.arrays]
        norms = backend.leave_scalar(made.norm.product(), norm_dtype(arrays), leaves)
        return sums, backend.leave_count(made.clipped), norms


def layer_shares(sizes: Sequence[int], *, uniform: bool) -> list[float]:
    """Return the share of the threshold that each layer gets: their squares add up to at most 1, exactly.

    Powers of two multiply a threshold exactly; other shares are lowered by more than all rounding can add.
    """
    total = sum(sizes)
    squares = [1.0 / len(sizes) if uniform or not total else size / total for size in sizes]
    shares = [math.sqrt(square) for square in squares]
    return [share if math.frexp(share)[0] in (0.0, 0.5) else share * (1.0 - 2.0**-50) for share in shares]


def check_batch(flat: FlatTree, leaves: Sequence[Any], mask: Any) -> None:
    """Raise a ValueError where the leaves, or the mask, have no common batch axis."""
    if not leaves:
        raise ValueError("grads holds no arrays; pass the gradients of each example, batch on axis 0.")
    shapes = [tuple(x.shape) for x in leaves]
    batch = shapes[0][:1]
    wrong = [i for i, shape in enumerate(shapes) if not shape or shape[:1] != batch]
    if wrong:
        paths = flat.paths()
        listed = ", ".join(f"{paths[i] or 'grads'} {shapes[i]}" for i in sorted({0, *wrong}))
        raise ValueError(
            f"every leaf must carry the batch on axis 0, with one length for all; the shapes are {listed}. "
            "Compute per-example gradients first, with jax.vmap(jax.grad(...)) or torch.func.vmap."
        )
    if mask is not None and tuple(getattr(mask, "shape", (len(mask),))) != batch:
        raise ValueError(
            f"mask must have one boolean for each of the {batch[0]} examples, got shape "
            f"{tuple(getattr(mask, 'shape', (len(mask),)))}."
        )
