"""Clip in place by several norms: of parameter groups with thresholds of their own, or of patterns that match names.

NaN and infinity in one part count for all parts, so that a step is applied, skipped or spoiled as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradclip._src import look
from gradclip._src.annotations import Ord, Policy, Scalar
from gradclip._src.backends import whole_scalar
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping
from gradclip._src.core.holders import Holders
from gradclip._src.core.layouts import Groups
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Norm, Order, of_all, of_numbers
from gradclip._src.core.pipeline import EachNorm, seen
from gradclip._src.core.rules import CLIP, Seen
from gradclip._src.core.values import Array
from gradclip._src.distributed.processes import ONE_PROCESS, Processes
from gradclip._src.inplace.driver import clip_jointly
from gradclip._src.inplace.gradients import Gradients, Taken, chosen, entered
from gradclip._src.passed.arguments import check_real, check_threshold
from gradclip._src.passed.leaves import counted
from gradclip._src.passed.parameters import ParameterList, have_thresholds
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.tree import dotted
from gradclip._src.words import listed, shown

if TYPE_CHECKING:
    from gradclip._src.monitor.monitor import Monitor


class ParameterPart(NamedTuple):
    """Parameters that share a norm, by their places in the list (in a tree, by those of its leaves).

    `max_norm` is what was passed, None if they are only measured. `told` is how errors name it. The `common` part are
    the parameter groups that have no threshold of their own.
    """

    name: str
    max_norm: Any
    places: Sequence[int]
    told: str
    common: bool = False

    @property
    def adaptive(self) -> AdaptiveThreshold | None:
        """The `AdaptiveThreshold` that sets the threshold."""
        return self.max_norm if isinstance(self.max_norm, AdaptiveThreshold) else None

    @property
    def skip_above(self) -> float:
        """From which multiple of the threshold the part is skipped."""
        return math.inf if self.adaptive is None else self.adaptive.skip_above

    @property
    def recorded(self) -> Any:
        """What a monitor records as the threshold."""
        return math.inf if self.max_norm is None else self.max_norm

    @property
    def agreed(self) -> str:
        """How all processes name the threshold; a parameter group may have another place and name on each."""
        return "a group's own" if self.told.startswith("parameters[") else self.told

    def threshold(self, order: Order) -> Any:
        """Return the threshold of this step; infinity if there is none. Raises like `AdaptiveThreshold.check_order`."""
        if self.adaptive is not None:
            return self.adaptive._for_order(order)
        return self.recorded


def parts_of(params: ParameterList, max_norm: object, *, alone: bool, what: str = "max_norm") -> list[ParameterPart]:
    """Return the parts of the parameters, each with a threshold.

    `alone`: no other processes are named, so each pattern must match here. Raises ValueError if it is unclear which
    threshold a parameter has, and TypeError for patterns that are no strings. Errors call the threshold `what`.
    """
    if isinstance(max_norm, Mapping):
        parts = _of_patterns(params, max_norm, what, alone=alone)
    else:
        parts = _of_groups(params, max_norm)
    followed = [part for part in parts if part.adaptive is not None]
    if len({id(part.max_norm) for part in followed}) < len(followed):
        raise ValueError(
            f"{listed([part.told for part in followed], ' and ')} are the same AdaptiveThreshold, which follows one "
            "norm. Make one for each."
        )
    return parts


def _of_groups(params: ParameterList, max_norm: object) -> list[ParameterPart]:
    places = [range(start, end) for start, end in pairwise([0, *accumulate(params.sizes)])]
    own = [number for number, group in enumerate(params.groups) if "max_norm" in group]
    common = [place for number in sorted({*range(len(places))}.difference(own)) for place in places[number]]
    _check_once(params.parameters, [common, *(places[number] for number in own)], params.name)
    rest = [ParameterPart("common", max_norm, common, "max_norm", common=True)] if len(own) < len(params.groups) else []
    names = dotted(tuple(_name_of(params.groups[number], number) for number in own))
    return rest + [
        ParameterPart(name, params.groups[number]["max_norm"], places[number], f"parameters[{number}]['max_norm']")
        for number, name in zip(own, names, strict=True)
    ]


def _name_of(group: Mapping[str, Any], number: int) -> str:
    name = group.get("name")
    return name if isinstance(name, str) else f"parameters.{number}"


def _of_patterns(
    params: ParameterList, thresholds: Mapping[Any, Any], what: str, *, alone: bool
) -> list[ParameterPart]:
    if any("max_norm" in group for group in params.groups):
        raise ValueError(
            f"thresholds come twice: parameter groups have the key 'max_norm', and {what} maps patterns of names to "
            "thresholds. Pass one of the two."
        )
    patterns = tuple(thresholds)
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise TypeError(
            f"as a dict, {what} maps patterns of the names of parameters to thresholds, such as "
            f"{{'encoder.*': 1.0, '*': 0.5}}, got {shown(dict(thresholds))}."
        )
    if params.tree is None:
        items, names = params.parameters, params.names_for(f"a pattern of {what}")
    else:
        flat = counted(params.tree, params.choice)
        items, names = flat.leaves, dotted(tuple(flat.paths()))
    matched = _matched(names, patterns, what)
    if alone:
        _check_matches(names, patterns, matched, what)
    _check_once(items, matched, names.__getitem__)
    each = zip(patterns, thresholds.values(), matched, strict=True)
    return [ParameterPart(pattern, limit, places, f"{what}[{pattern!r}]") for pattern, limit, places in each]


# Cached: matching takes longer than clipping.
@lru_cache(maxsize=64)
def _matched(names: tuple[str, ...], patterns: tuple[str, ...], what: str) -> tuple[tuple[int, ...], ...]:
    """Return, for each pattern, the places of the names that it is the first to match."""
    found: list[list[int]] = [[] for _ in patterns]
    for place, name in enumerate(names):
        first = next((number for number, one in enumerate(patterns) if fnmatchcase(name, one)), None)
        if first is None:
            raise ValueError(
                f"no pattern of {what} matches {name}. Add one, such as '*' at the end, for all others. Its "
                "threshold may be None: then they are only measured."
            )
        found[first].append(place)
    return tuple(map(tuple, found))


def _check_matches(names: Sequence[str], patterns: Sequence[str], matched: Sequence[Sequence[int]], what: str) -> None:
    for pattern, places in zip(patterns, matched, strict=True):
        if places:
            continue
        if any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} of {what} gets no parameter: patterns before it match all of its names. "
                "Put it before them."
            )
        raise ValueError(
            f"the pattern {pattern!r} of {what} matches no name. The names are {listed(names) or 'none'}. Correct it "
            "or leave it out."
        )


def _check_once(items: Sequence[Any], parts: Iterable[Sequence[int]], name: Callable[[int], str]) -> None:
    """Raise a ValueError that names a parameter which is in two parts."""
    if len(set(map(id, items))) == len(items):
        return
    part_of: dict[int, int] = {}
    for number, places in enumerate(parts):
        for place in places:
            if part_of.setdefault(id(items[place]), number) != number:
                raise ValueError(
                    f"{name(place)} occurs twice, under two thresholds, so its threshold is ambiguous. Pass it once."
                )


def several_norms(parameters: object, max_norm: object) -> bool:
    """Return whether parts of the parameters have thresholds of their own."""
    return isinstance(max_norm, Mapping) or have_thresholds(parameters)


def threshold_of_each(params: ParameterList, max_norm: Any, *, alone: bool) -> Any:
    """Return the thresholds of a call with a norm for each gradient.

    If they come by patterns of names or by parameter groups, that is a list with one for each parameter, or a tree.
    Elsewhere it is `max_norm`: for a tree of arrays, a dict without a wildcard is a prefix.
    """
    if not several_norms(params.groups, max_norm) or (params.tree is not None and not _has_wildcard(max_norm)):
        return max_norm
    some = chosen(params, params.choice, alone=alone)
    each = [(part.recorded, place) for part in parts_of(some, max_norm, alone=alone) for place in part.places]
    if params.tree is not None:
        flat = counted(params.tree, params.choice)
        return flat.arrange([limit for limit, _ in sorted(each, key=itemgetter(1))], math.inf)
    limits = {id(some.parameters[place]): limit for limit, place in each}
    return [limits.get(id(parameter), math.inf) for parameter in params.parameters]


def _has_wildcard(thresholds: object) -> bool:
    keys = thresholds if isinstance(thresholds, Mapping) else ()
    return any(isinstance(key, str) and any(sign in key for sign in "*?[") for key in keys)


def clamp_by_parts(params: ParameterList, clip_value: object) -> None:
    """Clamp the gradients that each pattern of names matches to its value."""
    parts = parts_of(params, clip_value, alone=True, what="clip_value")
    limits = [whole_scalar(part.recorded) for part in parts]
    taken = entered(params, ONE_PROCESS, *limits, to_write=True, apart=True)
    each_limit = zip(limits, parts, strict=True)
    bounds = [check_threshold(limit, part.told, backend=taken.backend) for limit, part in each_limit]
    places = _places(params, parts, taken.gradients)
    with taken.backend.precision():
        check_real(taken.arrays, taken.gradients.names)
        for bound, indices in zip(bounds, places, strict=True):
            taken.chosen(indices).clamp(bound)


def clip_ordinary(params: ParameterList, max_norm: object, settings: tuple[Ord | Order, Policy]) -> Scalar | None:
    """Clip ordinary gradients that no other process shares, as `clip_by_parts` does. None if that is not possible."""
    given = look.gradients(params.parameters if params.tree is None else params.tree)
    if given is None or (isinstance(given, look.Look) and (given.once is not None or not given.kernels.writable)):
        return None
    order, policy = Order.parse(settings[0]), Nonfinite.named(settings[1])
    parts = parts_of(params, max_norm, alone=True)
    if any(part.adaptive is not None for part in parts):
        return None
    limits = look.known_thresholds([part.threshold(order) for part in parts])
    every = [0] * (sum(len(part.places) for part in parts))
    for number, part in enumerate(parts):
        for place in part.places:
            every[place] = number
    if params.tree is None and len(every) > len(given.leaves):
        every = [part for part, owner in zip(every, params.parameters, strict=True) if owner.grad is not None]
    if limits is None or len(every) != len(given.leaves):
        return None
    if not isinstance(given, look.Look):
        return given.clip_parts_(every, limits, order, policy)
    layout = Groups.of_numbers(every, len(parts))
    norms = given.clip_several_(layout, np.array(limits, float), order)
    return None if norms is None else given.scalar(of_numbers(norms.tolist(), order))


def clip_by_parts(
    params: ParameterList,
    processes: Processes,
    max_norm: object,
    settings: tuple[Ord | Order, Policy],
    monitor: Monitor | None = None,
) -> Scalar:
    """Clip each part of the parameters by its own norm; return the norm of all, before clipping.

    `settings` are the order and the policy for NaN and infinity.
    """
    alone = processes is ONE_PROCESS
    with processes.preparing():
        order, policy = Order.parse(settings[0]), Nonfinite.named(settings[1])
        parts = parts_of(params, max_norm, alone=alone)
        limits = [whole_scalar(part.threshold(order)) for part in parts]
        agreed, skips = ", ".join(part.agreed for part in parts), [part.skip_above for part in parts]
        more = [("the order of thresholds", agreed), ("skip_above of each", skips), *params.choice.told]
        processes.ask(order, policy, limits, more=more)
        taken = entered(params, processes, *limits, to_write=True, apart=True)
        places = _places(params, parts, taken.gradients)
        each_limit = zip(limits, parts, strict=True)
        checked = [check_threshold(limit, part.told, backend=taken.backend) for limit, part in each_limit]
    asked = Clipping(checked, order, policy, CLIP)
    holders, backend = processes.holders(taken.backend), taken.backend
    each = monitor._watching() if monitor is not None and alone else None
    with backend.precision():
        if each is not None:
            each.measure(backend, taken.arrays, order, taken.gradients.names_of_layers)
        try:
            norms = clip_jointly(taken, skips, places, asked, holders)
        except FloatingPointError:
            if monitor is not None:
                monitor._missed(each)
            raise
        found = Found.of(taken, places, norms, order, holders)
        for number, (part, limit) in enumerate(zip(parts, checked, strict=True)):
            if part.adaptive is not None:
                _observe(part.adaptive, found, number, limit, asked)
        if monitor is not None:
            _record(monitor, parts, found, each, settings[1])
        return found.scalar(found.total, taken.arrays, taken.gradients.grads)


def _places(params: ParameterList, parts: Sequence[ParameterPart], gradients: Gradients) -> list[Sequence[int]]:
    """Return the indices of each part's gradients."""
    listed = params.parameters if gradients.tree is None else gradients.tree.leaves
    if len(gradients.owners) == len(listed):
        groups: list[Sequence[int]] = [part.places for part in parts]
    else:
        place_of = {id(owner): index for index, owner in enumerate(gradients.owners)}
        groups = [
            sorted({place_of[id(listed[place])] for place in part.places if id(listed[place]) in place_of})
            for part in parts
        ]
    for meeting in () if gradients.apart else gradients.meeting:
        if sum(any(index in group for index in meeting) for group in groups) > 1:
            raise ValueError(
                f"{gradients.named(meeting)} share memory, so they cannot be scaled by different numbers in place. "
                "Pass copies."
            )
    return groups


class Found(NamedTuple):
    """The norms of the parts before clipping, whether all are finite, and the norm of all, as a wide number."""

    taken: Taken
    places: Sequence[Sequence[int]]
    norms: Sequence[Norm]
    finite: Any
    total: Any
    holders: Holders

    @classmethod
    def of(
        cls, taken: Taken, places: Sequence[Sequence[int]], norms: Sequence[Norm], order: Order, holders: Holders
    ) -> Found:
        """Combine the norms of the parts."""
        xp = taken.backend.xp
        together = holders.together
        some = [norm for norm, group in zip(norms, places, strict=True) if group or together is not None] or norms[:1]
        finite = xp.all(xp.isfinite(xp.stack([norm.value for norm in some])))
        total = of_all(xp, xp.stack([norm.product() for norm in some]), order)
        if together is not None:
            finite = together.finite(taken.backend)
            total = xp.where(finite | ~xp.isfinite(total), total, math.nan)  # no norm counts a copy that holds NaN
        return cls(taken, places, norms, finite, total, holders)

    def scalar(self, norm: Array, arrays: Arrays, leaves: Sequence[Any]) -> Scalar:
        """Return a wide number as a scalar of the framework."""
        backend, gradients = self.taken.backend, self.taken.gradients
        return backend.leave_scalar(norm, self.holders.norm_dtype(arrays), leaves or gradients.grads)

    def of_part(self, number: int, *, told: bool = False) -> Scalar:
        """Return the norm of a part; as it is `told`, that of all if not all are finite."""
        backend, indices, norm = self.taken.backend, self.places[number], self.norms[number].product()
        norm = backend.xp.where(self.finite, norm, self.total) if told else norm
        leaves = [self.taken.gradients.grads[index] for index in indices]
        return self.scalar(norm, backend.chosen(self.taken.arrays, indices), leaves)


def _observe(adaptive: AdaptiveThreshold, found: Found, number: int, limit: float | Array, asked: Clipping) -> None:
    """Let an `AdaptiveThreshold` observe its norm, and that the step is not finite if another part is not."""
    norm = found.of_part(number)
    beyond = seen(found.taken.backend, found.norms[number], limit, adaptive.skip_above)
    shown = Seen(*(flag & found.finite for flag in adaptive._shown(norm, limit, beyond)[:3]))
    adaptive._observe(norm, limit, asked.order, asked.nonfinite, shown)


def _record(
    monitor: Monitor, parts: Sequence[ParameterPart], found: Found, each: EachNorm | None, nonfinite: Policy
) -> None:
    """Record the common part as the step, or without one the last part; and each part but the common one as a group."""
    step = 0 if parts[0].common else len(parts) - 1
    groups = [None if part.common else monitor._of_group(part.name) for part in parts]  # while notes are there
    for number, (part, group) in enumerate(zip(parts, groups, strict=True)):
        norm = found.of_part(number, told=True)
        if group is not None:
            group._watched(each and each.of(found.places[number], found.taken.backend.xp.stack))
            group.record(norm, part.recorded, nonfinite=nonfinite)
        if number == step:
            monitor._watched(each)
            monitor.record(norm, part.recorded, nonfinite=nonfinite)
