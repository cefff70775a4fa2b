"""Clip each example of a batch by its own norm and add up, reading the data once if the backend can, else twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gradclip._src import native
from gradclip._src.backends.host.laid import kind_of
from gradclip._src.backends.registry import entry_of
from gradclip._src.backends.sums import ENOUGH, examples_norm_error
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import exceeds
from gradclip._src.core.decision import Clipping
from gradclip._src.core.derivative import ClipRule
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.holders import ALONE
from gradclip._src.core.layouts import EXAMPLE, EXAMPLE_ALONE
from gradclip._src.core.nonfinite import DROP, Nonfinite
from gradclip._src.core.norms import EUCLIDEAN, Norm, norm_dtype, relative_error, settled
from gradclip._src.core.pipeline import decide
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import Target, known_rule_for_sums, rule_for_sums
from gradclip._src.core.values import Array
from gradclip._src.look import Look
from gradclip._src.passed.arguments import check_real, check_threshold, scalar_array
from gradclip._src.private.sums.settings import PerExampleSettings, grid_for
from gradclip._src.tree import FlatTree

_NOT_ON_A_GRID = (
    "cannot be rounded to a grid. Leave out grid, or pass its real and imaginary parts as two leaves, which have the "
    "same norm."
)


class Summed(NamedTuple):
    """The result for a batch: sums over its examples, their norms, and which examples, or how many, are clipped."""

    sums: Sequence[Any]
    norm: Any
    clipped: Any


class LeafGroup(NamedTuple):
    """Leaves that are clipped together, to a share of their threshold. The fields are those of `PerExampleSettings`.

    It must not hold a traced array: JAX keeps whatever its derivative rules hold.
    """

    backend: Backend
    outline: FlatTree
    indices: Sequence[int]
    nonfinite: Nonfinite
    target: Target
    sum_dtype: str | None
    grid: int | None
    share: float = 1.0

    @classmethod
    def of(
        cls, backend: Backend, outline: FlatTree, indices: Sequence[int], settings: PerExampleSettings, share: float
    ) -> LeafGroup:
        """Return the leaves at `indices`, clipped by these settings but for the threshold."""
        how = settings.policy, settings.target, settings.dtype_of_sums, settings.grid
        return cls(backend, outline, indices, *how, share)

    def clip(self, prepared: Sequence[Any], threshold: object, mask: Array | None) -> Summed:
        """Clip the leaves; return their sums, the norms and the number of clipped examples, all with derivatives."""
        checked = check_threshold(threshold, backend=self.backend)
        own = checked if isinstance(checked, float) else None
        rule = ClipRule(EUCLIDEAN, own, self.nonfinite, self.target, EXAMPLE, summed=True, share=self.share)
        clip = self.backend.differentiable(partial(self._with_integers_apart, own), rule)
        sums, norms, (count, *integers) = clip(prepared, _array_of(threshold, own, prepared[0]), mask)
        return Summed([*sums, *integers], norms, count)

    def _with_integers_apart(
        self, own: float | None, prepared: Sequence[Any], max_norm: Any, mask: Array | None
    ) -> tuple[Sequence[Any], Any, list[Any]]:
        """Return differentiable sums, the norms, and a list of the number clipped and any integer sums.

        `own`: the threshold if it is a known number, else None.
        """
        with self.backend.precision():
            arrays = self.backend.enter(prepared)
            made = self.summed(arrays, self.backend.scalar(max_norm, arrays) if own is None else own, mask)
        return ([], made.norm, [made.clipped, *made.sums]) if self.grid else (made.sums, made.norm, [made.clipped])

    def summed(self, arrays: Arrays, max_norm: float | Array, mask: Array | None) -> Summed:
        """Clip and add up the examples of `arrays`; return their sums, the norms and the number of clipped ones."""
        target = self.target
        if self.grid is not None:
            check_real(arrays, self._names, _NOT_ON_A_GRID)
            grid = grid_for(self.grid, arrays.sharing(EXAMPLE), arrays[0].shape[0], self.share)
            target = Target(grid.steps, target.gamma, grid.share, integers=True)
        clipping = Clipping(shared_threshold(self.backend, max_norm, self.share), EUCLIDEAN, self.nonfinite, target)
        made = Batch(self.backend, arrays, clipping, self._names).clip_and_sum(mask)
        leaves = [self.outline.leaves[i] for i in self.indices]
        return Summed(
            self.backend.leave_sums(made.sums, arrays, self.sum_dtype),
            self.backend.leave_scalar(made.norm.product(), norm_dtype(arrays), leaves),
            self.backend.leave_count(made.clipped, leaves),
        )

    def _names(self) -> list[str]:
        paths = self.outline.paths()
        return [paths[i] for i in self.indices]


def shared_threshold(backend: Backend, threshold: Any, share: float) -> Any:
    """Return the share of a checked threshold, or 0 if the product is subnormal."""
    if share == 1:
        return threshold
    shared, tiny = threshold * share, backend.wide.tiny
    if isinstance(shared, float):
        return 0.0 if shared < tiny else shared
    return backend.xp.where(shared < tiny, 0.0, shared)


def _array_of(threshold: object, known: float | None, gradient: Any) -> Any:
    """Return a threshold that may have a derivative as an array, else None: one of another framework has none here.

    Raises TypeError if its value is not known either.
    """
    array, ours = scalar_array(threshold), entry_of(gradient)
    other = entry_of(array)
    if ours is None or other is None or other is ours or not ours.has_derivatives:
        return array
    if known is None:
        raise TypeError(
            f"max_norm is an array of {other.name} without a known value, but the gradients are of {ours.name}. Pass a "
            "number, or convert it."
        )
    return None


def nothing(backend: Backend, examples: tuple[int, ...], leaves: Sequence[Any]) -> Summed:
    """Return what `LeafGroup.clip` returns for no leaves of a batch of this shape, `(batch,)`."""
    with backend.precision():
        zeros = backend.zeros(examples, ())
        return Summed([], backend.leave_scalar(zeros, "float32", leaves), backend.leave_count(zeros > 0, leaves))


def summed_at_once(
    given: Look, settings: PerExampleSettings, max_norm: float, inside: np.ndarray | None
) -> Summed | None:
    """Return what `LeafGroup.summed` returns if the kernels' first look settles it, with plain numbers; else None."""
    kernels, leaves, array = given.kernels, given.leaves, given.backend.array
    kind = kind_of(tuple(kernels.dtypes))
    widths = [math.prod(leaf.shape[1:]) for leaf in leaves]
    if not (kernels.in_order and len(leaves[0]) and sum(widths)) or kind.any_complex:
        return None
    # The kernels read the squares first: NaN means that the example is left out.
    squares = np.zeros(len(leaves[0])) if inside is None else np.where(inside, 0.0, np.nan)
    totals = np.zeros(sum(widths))
    into = [native.kernels.describe_buffers([buffer])[0] for buffer in (squares, totals)]
    rule = known_rule_for_sums(settings.target, max_norm, examples_norm_error(sum(widths), 2.0))
    native.kernels.add_examples(kernels, len(squares), rule, into[0], into[1], given.backend.threads())
    norms = np.sqrt(squares if inside is None else np.where(inside, squares, 0.0))
    measured = norms if inside is None else norms[inside]
    if not np.isfinite(measured).all() or (kind.enough > 0 and not (measured > math.sqrt(kind.enough)).all()):
        return None
    sums, asked = [], settings.dtype_of_sums
    for leaf, width, end in zip(leaves, widths, accumulate(widths), strict=True):
        own = "float64" if "64" in str(leaf.dtype) else "float32"  # no leaf is complex
        sums.append(array(totals[end - width : end].reshape(leaf.shape[1:]), asked or own))
    clipped = np.int64(np.count_nonzero(norms > max_norm))
    return Summed(sums, array(norms, kind.dtype_of_norm), array(clipped, "int64"))


class Batch(NamedTuple):
    """The gradients of a batch, and how to clip each example. `names` are as in `decide`."""

    backend: Backend
    arrays: Arrays
    clipping: Clipping
    names: Callable[[], Sequence[str]]

    def clip_and_sum(self, mask: Array | None) -> Summed:
        """Clip each example by its own norm and add up the examples in the mask, or all if it is None."""
        batch = self._zeroed() if self.clipping.nonfinite.zeroes else self
        summed = batch._in_one_reading(mask)
        return batch._in_two_readings(mask) if summed is None else summed

    def _zeroed(self) -> Batch:
        """Put zeros for the non-finite elements of a batch, if its values cannot be read for free."""
        backend, clipping = self.backend, self.clipping
        if backend.concrete or clipping.target.integers:
            return self
        return self._replace(arrays=backend.zeroed(self.arrays), clipping=replace(clipping, nonfinite=DROP))

    def _in_two_readings(self, mask: Array | None) -> Summed:
        backend, arrays, clipping = self.backend, self.arrays, self.clipping
        integers = clipping.target.integers
        scope = EXAMPLE_ALONE if integers else EXAMPLE
        made = decide(backend, arrays, clipping, self.names, layout=scope, mask=mask, holders=ALONE)
        sums = backend.weighted_sums(made.arrays, made.coefficient, integers=integers)
        threshold = backend.scalar(clipping.max_norm, self.arrays)
        clipped = exceeds(settled(backend, made.norm), threshold) & ~made.coefficient.keep
        return Summed(sums, made.norm, clipped)

    def _in_one_reading(self, mask: Array | None) -> Summed | None:
        """Clip and add up in one reading, or return None if the backend cannot.

        Examples with sums of squares that cannot be trusted are read again, separately. So what an example adds does
        not depend on the others.
        """
        backend, arrays, clipping = self.backend, self.arrays, self.clipping
        count = arrays.sharing(EXAMPLE)
        of_squares, trusting = backend.examples_error(arrays, count), self._always_trusted()
        if clipping.target.integers or not count or of_squares is None or not (backend.concrete or trusting):
            return None
        error = relative_error(clipping.order, of_squares, FLOAT64, exact=False)
        if isinstance(clipping.max_norm, float):
            rule = known_rule_for_sums(clipping.target, float(clipping.max_norm), error)
        else:
            rule = rule_for_sums(backend.xp, clipping.target, clipping.max_norm, error)
        spoil = not (backend.concrete or clipping.nonfinite.blanks)
        found = backend.add_examples(arrays, rule, mask, spoil=spoil)
        if found is None:
            return None
        sums, norms = found
        norm = Norm(norms, None, error, 0.0)
        summed = Summed(sums, norm, exceeds(norm, clipping.max_norm))
        if trusting:
            return summed
        trusted = backend.xp.isfinite(norms) & (norms > math.sqrt(ENOUGH) if FLOAT64 in arrays.formats else True)
        others = ~trusted if mask is None else ~trusted & mask
        if not backend.xp.any(others):
            return summed
        # Examples out of range added nothing. Those too small to be trusted did, so add up the trusted ones alone.
        counted = backend.add_examples(arrays, rule, trusted if mask is None else trusted & mask, spoil=False)
        assert counted is not None
        return self._joined(counted[0], summed, others)

    def _joined(self, sums: Sequence[Any], summed: Summed, others: Array) -> Summed:
        """Add the sums of the other examples, which are read separately, to the sums of the trusted ones."""
        xp, apart = self.backend.xp, self._in_two_readings(others)
        norm = replace(summed.norm, value=xp.where(others, apart.norm.product(), summed.norm.value))
        clipped = xp.where(others, apart.clipped, summed.clipped)
        return Summed([a + b for a, b in zip(sums, apart.sums, strict=True)], norm, clipped)

    def _always_trusted(self) -> bool:
        """Say whether one reading is always enough, so no value needs to be checked."""
        policy = self.clipping.nonfinite
        if self.backend.concrete:
            return policy.blanks and FLOAT64 not in self.arrays.formats
        return not (policy.raises or policy.zeroes)
