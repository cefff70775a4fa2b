"""Clip many layers of traced arrays at once: all norms form one vector, so what follows from a norm is traced once.

Per layer, only the sum and the products of its elements are traced and compiled.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradclip.core.arrays import Arrays
from gradclip.core.decide import Clipping, decide_each
from gradclip.core.derivative import ClipRule, LayersRule
from gradclip.core.formats import product_format
from gradclip.core.holders import Holders
from gradclip.core.nonfinite import PROPAGATE
from gradclip.core.norms import Norm, Order
from gradclip.core.protocols import Backend
from gradclip.core.records import Coefficient, Factors, Multiplier
from gradclip.core.rules import CLIP
from gradclip.core.scopes import LAYER
from gradclip.core.values import Array


def clipped(
    backend: Backend,
    holders: Holders,
    leaves: Sequence[Any],
    groups: Sequence[Sequence[int]],
    thresholds: Sequence[Any],
    clipping: Clipping,
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Clip each group of traced leaves by its norm; return the leaves by index and the norms by group number.

    Groups that cannot be clipped this way are missing from both. Thresholds must be checked: floats, or scalar arrays.
    """
    results: dict[int, Any] = {}
    norms: dict[int, Any] = {}
    for numbers in _together(backend, leaves, groups, thresholds):
        known, given = _thresholds(backend, [thresholds[number] for number in numbers])
        mine = replace(clipping, max_norm=known)
        batch = _Layers.of(backend, holders, leaves, [groups[number] for number in numbers], mine)
        made, found = batch.run(leaves, given, with_leaves=True)
        results.update(zip(batch.indices, made, strict=True))
        norms.update(zip(numbers, found, strict=True))
    return results, norms


def measured(
    backend: Backend, holders: Holders, leaves: Sequence[Any], groups: Sequence[Sequence[int]], order: Order
) -> dict[int, Any]:
    """Return the norm of each group of traced leaves by group number; groups that cannot be measured so are missing."""
    norms: dict[int, Any] = {}
    for numbers in _together(backend, leaves, groups, [math.inf] * len(groups)):
        clipping = Clipping(math.inf, order, PROPAGATE, CLIP)
        batch = _Layers.of(backend, holders, leaves, [groups[number] for number in numbers], clipping)
        norms.update(zip(numbers, batch.run(leaves, None, with_leaves=False)[1], strict=True))
    return norms


def _together(
    backend: Backend, leaves: Sequence[Any], groups: Sequence[Sequence[int]], thresholds: Sequence[Any]
) -> list[list[int]]:
    """Return, in lists, the numbers of the groups whose norms and thresholds can share a vector."""
    found: dict[Hashable, list[int]] = {}
    if backend.concrete or len(groups) < 2:
        return []
    for number, (group, threshold) in enumerate(zip(groups, thresholds, strict=True)):
        known = isinstance(threshold, float)
        of_leaves = backend.together([leaves[i] for i in group])
        of_threshold = None if known else (backend.together([threshold]), str(threshold.dtype))
        if of_leaves is not None:
            found.setdefault((of_leaves, of_threshold), []).append(number)
    return list(found.values())


def _thresholds(backend: Backend, thresholds: Sequence[Any]) -> tuple[Any, Any]:
    """Return the thresholds as `(known, None)` or `(None, traced)`, as one value if all are the same."""
    first = thresholds[0]
    if isinstance(first, float):
        alike = all(one is first for one in thresholds) or len(set(thresholds)) == 1
        return (first if alike else np.array(thresholds)), None
    return None, first if all(one is first for one in thresholds) else backend.xp.stack(thresholds)


@dataclass(frozen=True)
class _Layers:
    """Groups of leaves. It holds no traced array: JAX keeps the values that functions of its rules capture."""

    backend: Backend
    holders: Holders
    indices: list[int]
    sizes: list[int]
    patterns: Sequence[Any]
    clipping: Clipping

    @classmethod
    def of(
        cls,
        backend: Backend,
        holders: Holders,
        leaves: Sequence[Any],
        groups: Sequence[Sequence[int]],
        clipping: Clipping,
    ) -> "_Layers":
        indices = [i for group in groups for i in group]
        patterns = backend.patterns([leaves[i] for i in indices])
        return cls(backend, holders, indices, list(map(len, groups)), patterns, clipping)

    def run(self, leaves: Sequence[Any], given: Array | None, *, with_leaves: bool) -> tuple[list[Any], list[Any]]:
        """Return the clipped leaves, if requested, and the norms; `given` are the thresholds if they are traced."""
        asked = self.clipping
        rule = LayersRule(ClipRule(asked.order, asked.max_norm, asked.nonfinite, asked.target, LAYER), self.sizes)
        call = self.backend.differentiable(self._clipped if with_leaves else self._measured, rule)
        results, norms, _ = call([self.backend.prepare(leaves[i]) for i in self.indices], given, None)
        return results, norms

    def _clipped(
        self, prepared: Sequence[Any], max_norm: Array | None, _: None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        with self.backend.precision():
            groups = self._groups(prepared)
            asked = self.clipping if max_norm is None else replace(self.clipping, max_norm=max_norm)
            norm, coefficient, arrays = decide_each(self.backend, groups, asked, self.holders)
            if isinstance(coefficient, Multiplier):
                shrunk = coefficient.scaled(self.backend, Arrays(arrays))
                return self.backend.leave_all(shrunk, self.patterns), self._norms(norm, groups), []
            halves = any(product_format(x, self.backend.wide) is not self.backend.wide for x in arrays)
            coefficients = _each(self.backend, coefficient, narrow=halves)
            of_leaves = [one for one, size in zip(coefficients, self.sizes, strict=True) for _ in range(size)]
            shrunk = self.backend.shrink_each(Arrays(arrays), of_leaves, LAYER)
            return self.backend.leave_all(shrunk, self.patterns), self._norms(norm, groups), []

    def _measured(self, prepared: Sequence[Any], _max_norm: None, _: None) -> tuple[list[Any], list[Any], list[Any]]:
        with self.backend.precision():
            groups = self._groups(prepared)
            norm = self.holders.measure_each(self.backend, groups, self.clipping.order)
            return [], self._norms(norm, groups), []

    def _groups(self, prepared: Sequence[Any]) -> list[Arrays]:
        rest = iter(self.backend.enter(prepared))
        return [Arrays(list(itertools.islice(rest, size))) for size in self.sizes]

    def _norms(self, norm: Norm, groups: Sequence[Arrays]) -> list[Any]:
        """Return the norms as scalars."""
        dtypes = list(map(self.holders.norm_dtype, groups))
        product = norm.product()
        of_dtype = {
            dtype: self.backend.unstacked([self.backend.leave_scalar(product, dtype, self.patterns)])[0]
            for dtype in dict.fromkeys(dtypes)
        }
        return [of_dtype[dtype][number] for number, dtype in enumerate(dtypes)]


def _each(backend: Backend, coefficient: Coefficient, *, narrow: bool) -> list[Coefficient]:
    """Split vectors into one coefficient per entry; `narrow` says whether half types are scaled."""
    pairs = [coefficient.wide, coefficient.narrow] if narrow else [coefficient.wide]
    factors = [factor for pair in pairs for factor in (pair.first, pair.second)]
    given = [coefficient.keep, coefficient.blank, *(x for x in factors if x is not None)]
    found = iter(backend.unstacked(given))
    keeps, blanks = next(found), next(found)
    nothing = [None] * len(keeps)
    scalars = [nothing if factor is None else next(found) for factor in factors]
    wides = list(map(Factors, *scalars[:2]))
    return list(map(Coefficient, keeps, blanks, wides, map(Factors, *scalars[2:]) if narrow else wides))
