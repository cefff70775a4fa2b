"""Clip leaves with one call that frameworks can trace and differentiate: a group, many groups, or the units of a leaf.

The norms of many groups form one vector, so what follows from a norm is traced once. Per group, only the sum and the
products of its elements are traced and compiled.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping, left_norms, together
from gradclip._src.core.derivative import ClipRule, LayersRule
from gradclip._src.core.holders import Holders
from gradclip._src.core.layouts import LAYER, Groups, Layout, Scope
from gradclip._src.core.norms import Norm
from gradclip._src.core.pipeline import decide, measure_all
from gradclip._src.core.protocols import Backend
from gradclip._src.core.units import Adaptive, AdaptiveRule
from gradclip._src.core.values import Array
from gradclip._src.passed.leaves import names_of
from gradclip._src.tree import FlatTree


def batches_of(
    backend: Backend, leaves: Sequence[Any], groups: Sequence[Sequence[int]], thresholds: Sequence[Any]
) -> list[list[int]]:
    """Return, in lists, the numbers of the groups whose norms and thresholds can share a vector."""
    together: dict[Hashable, list[int]] = {}
    for number, (group, threshold) in enumerate(zip(groups, thresholds, strict=True)):
        alone = backend.concrete or len(groups) < 2
        of_leaves = None if alone else backend.vectorisable_with([leaves[i] for i in group])
        known = isinstance(threshold, float)
        of_threshold = None if alone or known else (backend.vectorisable_with([threshold]), str(threshold.dtype))
        together.setdefault(number if of_leaves is None else (of_leaves, of_threshold), []).append(number)
    return list(together.values())


def shared_threshold(backend: Backend, thresholds: Sequence[Any], given: Sequence[Any]) -> tuple[Any, Any]:
    """Return the threshold of a batch if it is known, and if it is an array: one value, or a vector."""
    first = thresholds[0]
    if len(thresholds) == 1:  # it may be known and have a derivative
        return first if isinstance(first, float) else None, given[0]
    if isinstance(first, float):
        return together(thresholds), None
    return None, first if all(one is first for one in thresholds) else backend.xp.stack(thresholds)


@dataclass(frozen=True)
class DifferentiableClip:
    """Leaves to clip in one call. It holds no traced array: JAX keeps the values that functions of its rules capture.

    `outline` names the leaves. With `adaptive`, thresholds follow from the arrays beside the leaves.
    """

    backend: Backend
    holders: Holders
    indices: Sequence[int]
    layout: Layout
    patterns: Sequence[Any]
    clipping: Clipping
    outline: FlatTree
    adaptive: Adaptive | None = None

    @classmethod
    def of(
        cls,
        backend: Backend,
        holders: Holders,
        groups: Sequence[Sequence[int]],
        clipping: Clipping,
        outline: FlatTree,
        scope: Scope = LAYER,
        adaptive: Adaptive | None = None,
    ) -> "DifferentiableClip":
        """Return the batch of one group with a scope, or of several groups. The outline has the leaves' patterns."""
        indices = [index for group in groups for index in group]
        layout = scope if len(groups) == 1 else Groups.consecutive(groups)
        patterns = [outline.leaves[index] for index in indices]
        return cls(backend, holders, indices, layout, patterns, clipping, outline, adaptive)

    def run(
        self, leaves: Sequence[Any], given: Array | None, *, beside: Sequence[Any] = (), with_leaves: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Return the clipped leaves, if requested, and the norms of the groups, or an array of those of the units.

        `given` are the thresholds if they are traced, `beside` the arrays that adaptive thresholds follow.
        """
        call = self.backend.differentiable(self._clipped if with_leaves else self._measured, self._rule)
        mine = [leaves[index] for index in self.indices]
        results, norms, _ = call(list(map(self.backend.prepare, [*mine, *beside])), given, None)
        return results, norms if isinstance(self.layout, Groups) else [norms]

    @property
    def _rule(self) -> Any:
        asked = self.clipping
        scope = self.layout if isinstance(self.layout, Scope) else LAYER
        rule = ClipRule(asked.order, asked.max_norm, asked.nonfinite, asked.target, scope)
        if isinstance(self.layout, Groups):
            return LayersRule(rule, list(map(len, self.layout.groups)))
        return rule if self.adaptive is None else AdaptiveRule(rule, self.adaptive)

    def _clipped(self, prepared: Sequence[Any], max_norm: Array | None, _: None) -> tuple[list[Any], Any, list[Any]]:
        backend = self.backend
        with backend.precision():
            arrays = backend.enter(prepared[: len(self.indices)])
            asked = self._asked(max_norm, prepared[len(self.indices) :])
            made = decide(backend, arrays, asked, self._names, layout=self.layout, holders=self.holders)
            return backend.leave_all(made.scaled(backend), self.patterns), self._left(made.norm, arrays), []

    def _measured(self, prepared: Sequence[Any], _max_norm: None, _: None) -> tuple[list[Any], Any, list[Any]]:
        with self.backend.precision():
            arrays = self.backend.enter(prepared)
            norm = measure_all(self.backend, arrays, self.layout, self.clipping.order, self.holders)
            return [], self._left(norm, arrays), []

    def _asked(self, max_norm: Array | None, beside: Sequence[Any]) -> Clipping:
        if self.adaptive is not None:
            params = self.backend.enter(beside[:1])
            order, scope = self.clipping.order, self.layout
            assert isinstance(scope, Scope)
            norm = measure_all(self.backend, params, scope, order, self.holders)
            return replace(self.clipping, max_norm=self.adaptive.of_norm(self.backend, norm, params, beside[1:]))
        return self.clipping if self.clipping.max_norm is not None else replace(self.clipping, max_norm=max_norm)

    def _names(self) -> list[str]:
        names = names_of(self.outline)
        return [names[index] for index in self.indices]

    def _left(self, norm: Norm, arrays: Arrays) -> Any:
        """Return the norm, or the norms of several groups as a list, as scalars."""
        if isinstance(self.layout, Groups):
            return left_norms(self.backend, self.layout, norm, arrays, self.patterns)
        return self.backend.leave_scalar(norm.product(), self.holders.norm_dtype(arrays), self.patterns)
