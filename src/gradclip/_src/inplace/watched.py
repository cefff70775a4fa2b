"""What a monitor records of a call with many norms: the layer or unit whose norm is the largest part of its threshold.

So a step counts as clipped if any of them was. The norms of layers are recorded beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradclip._src.annotations import Clips, Ord
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping, Each, Following
from gradclip._src.core.holders import Holders
from gradclip._src.core.layouts import Groups, Several
from gradclip._src.core.norms import Norm, Order, of_all
from gradclip._src.core.pipeline import EachNorm, entries_of
from gradclip._src.core.protocols import Backend
from gradclip._src.core.units import Adaptive
from gradclip._src.core.values import Array
from gradclip._src.inplace.driver import clip_parts
from gradclip._src.inplace.gradients import Taken
from gradclip._src.monitor.monitor import Monitor


class ClipsWatched(Clips, total=False):
    """The arguments of calls that clip by layer."""

    ord: Ord
    monitor: Monitor | None


def clip_watched(
    taken: Taken,
    layout: Several,
    thresholds: Each | Following,
    clipping: Clipping,
    holders: Holders,
    watching: tuple[Monitor, bool],
    arranged: Callable[[list[Any]], Any] = list,
) -> Any:
    """Clip as `clip_parts` does; then have the monitor record the call. Return the norms, `arranged` before that.

    `watching` are the monitor, and whether no other processes are named: only then are the norms of layers recorded.
    """
    (monitor, alone), (gradients, backend, arrays) = watching, taken
    each = monitor._watching() if alone else None
    if isinstance(thresholds, Following) and holders.together is not None:
        thresholds = replace(thresholds, adaptive=_Noting(thresholds.adaptive.known, thresholds.adaptive.as_arrays))
    try:
        norms = clip_parts(taken, layout, thresholds, clipping, holders)
    except FloatingPointError:
        if each is not None:
            each.measure(backend, arrays, clipping.order, gradients.names_of_layers)
        monitor._missed(each)
        raise
    result = arranged(norms)
    if norms:
        found = _of_parts(thresholds, backend, layout, clipping.order)
        record_norms(monitor, each, backend, norms, found, lambda: _names(taken, layout), clipping)
    return result


def record_norms(
    monitor: Monitor,
    each: EachNorm | None,
    backend: Backend,
    norms: Sequence[Any],
    thresholds: Sequence[Any],
    names: Callable[[], Sequence[str]],
    clipping: Clipping,
) -> None:
    """Record the norms of the parts of a step, each with one threshold, or one for each of its units."""
    xp, flat = _flat(backend, norms)
    if each is not None:
        each.put(xp.stack([one[0] if len(one) == 1 else of_all(xp, one, clipping.order) for one in flat]), names())
    monitor._watched(each)
    monitor.record(*_largest(backend, xp, flat, thresholds), nonfinite=clipping.nonfinite.name)


@dataclass(frozen=True)
class _Noting(Adaptive):
    """Keeps the last thresholds: to measure weights again, all processes would have to take part."""

    last: list[Array] = field(default_factory=list)

    def of_norm(self, backend: Backend, norm: Norm, arrays: Arrays, given: Sequence[Any]) -> Array:
        """Return the thresholds, and keep them."""
        self.last[:] = [super().of_norm(backend, norm, arrays, given)]
        return self.last[0]


def _of_parts(thresholds: Each | Following, backend: Backend, layout: Several, order: Order) -> Sequence[Any]:
    """Return the threshold of each part, or those of its units if they follow weights."""
    if isinstance(thresholds, Each):
        return thresholds.values
    if isinstance(thresholds.adaptive, _Noting):
        return [entries_of(layout, thresholds.adaptive.last[0], number) for number in range(layout.number)]
    return [thresholds.of_part(backend, layout, number, order) for number in range(layout.number)]


def _flat(backend: Backend, norms: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the norms of each layer or its units as a vector, a zero where there is none, and their namespace."""
    if backend.concrete:
        vectors = [np.asarray(one, np.float64).reshape(-1) for one in norms]
        return np, [vector if len(vector) else np.zeros(1) for vector in vectors]
    xp = backend.xp
    return xp, [xp.reshape(one, (-1,)) if math.prod(one.shape) else xp.zeros((1,)) for one in norms]


def _names(taken: Taken, layout: Several) -> list[str]:
    names = list(taken.gradients.names_of_layers())
    if not isinstance(layout, Groups):
        return names
    more = [f" and {len(group) - 1} more" if len(group) > 1 else "" for group in layout.groups]
    return [names[group[0]] + others for group, others in zip(layout.groups, more, strict=True)]


def _largest(backend: Backend, xp: Any, norms: Sequence[Any], thresholds: Sequence[Any]) -> tuple[Any, Any]:
    """Return the norm that is the largest multiple of its threshold, and that threshold. NaN is larger than all."""
    if any(np.shape(one) for one in thresholds):
        return _largest_unit(backend, norms, thresholds)
    each = xp.stack([one[0] if len(one) == 1 else xp.max(one) for one in norms])
    first = thresholds[0]
    known = all(isinstance(one, float) for one in thresholds)
    if len(set(thresholds)) == 1 if known else all(one is first for one in thresholds):
        return xp.max(each), first
    if backend.concrete:
        limits = np.array(thresholds, float)
    else:
        limits = xp.astype(xp.stack([backend.scalar(one, ()) for one in thresholds]), each.dtype)
    return _largest_share(xp, each, limits)


def _largest_unit(backend: Backend, norms: Sequence[Any], thresholds: Sequence[Any]) -> tuple[Any, Any]:
    """Return the same where each norm has a threshold of its own."""
    xp, limits = _flat(backend, thresholds)
    if backend.concrete:
        return _largest_share(np, np.concatenate(norms), np.concatenate(limits))
    each = xp.concat(norms)
    return _largest_share(xp, each, xp.astype(xp.concat(limits), each.dtype))


def _largest_share(xp: Any, each: Any, limits: Any) -> tuple[Any, Any]:
    shares = xp.where(limits > 0, each / xp.where(limits > 0, limits, 1.0), xp.where(each > 0, math.inf, 0.0))
    place = xp.reshape(xp.argmax(xp.where(xp.isnan(shares), math.inf, shares)), (1,))
    return xp.take(each, place, axis=0)[0], xp.take(limits, place, axis=0)[0]
