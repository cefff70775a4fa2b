"""Thresholds of parts of the parameters: those of parameter groups, or those of patterns that match names."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gradclip._src.core.norms import Order
from gradclip._src.passed.leaves import counted
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.thresholds.holder import AdaptiveNorm
from gradclip._src.tree import dotted
from gradclip._src.words import listed, shown


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
    def adaptive(self) -> AdaptiveNorm | None:
        """The `AdaptiveNorm` that sets the threshold."""
        return self.max_norm if isinstance(self.max_norm, AdaptiveNorm) else None

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
        """Return the threshold of this step; infinity if there is none. Raises like `AdaptiveNorm.check_order`."""
        if self.adaptive is not None:
            return self.adaptive.for_order(order)
        return self.recorded


def parts_of(params: ParameterList, max_norm: object, *, alone: bool) -> list[ParameterPart]:
    """Return the parts of the parameters, each with a threshold.

    `alone`: no other processes are named, so each pattern must match here. Raises ValueError if it is unclear which
    threshold a parameter has, and TypeError for patterns that are no strings.
    """
    parts = (
        _of_patterns(params, max_norm, alone=alone) if isinstance(max_norm, Mapping) else _of_groups(params, max_norm)
    )
    followed = [part for part in parts if part.adaptive is not None]
    if len({id(part.max_norm) for part in followed}) < len(followed):
        raise ValueError(
            f"{listed([part.told for part in followed], ' and ')} are the same AdaptiveNorm, which follows one norm. "
            "Make one for each."
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


def _of_patterns(params: ParameterList, thresholds: Mapping[Any, Any], *, alone: bool) -> list[ParameterPart]:
    if any("max_norm" in group for group in params.groups):
        raise ValueError(
            "thresholds come twice: parameter groups have the key 'max_norm', and max_norm maps patterns of names to "
            "thresholds. Pass one of the two."
        )
    patterns = tuple(thresholds)
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise TypeError(
            "as a dict, max_norm maps patterns of the names of parameters to thresholds, such as {'encoder.*': 1.0, "
            f"'*': 0.5}}, got {shown(dict(thresholds))}."
        )
    if params.tree is None:
        items, names = params.parameters, params.names_for("a pattern of max_norm")
    else:
        flat = counted(params.tree, params.choice)
        items, names = flat.leaves, dotted(tuple(flat.paths()))
    matched = _matched(names, patterns)
    if alone:
        _check_matches(names, patterns, matched)
    _check_once(items, matched, names.__getitem__)
    each = zip(patterns, thresholds.values(), matched, strict=True)
    return [ParameterPart(pattern, limit, places, f"max_norm[{pattern!r}]") for pattern, limit, places in each]


# Cached: matching takes longer than clipping.
@lru_cache(maxsize=64)
def _matched(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for each pattern, the places of the names that it is the first to match."""
    found: list[list[int]] = [[] for _ in patterns]
    for place, name in enumerate(names):
        first = next((number for number, one in enumerate(patterns) if fnmatchcase(name, one)), None)
        if first is None:
            raise ValueError(
                f"no pattern of max_norm matches {name}. Add one, such as '*' at the end, for all others. Its "
                "threshold may be None: then they are only measured."
            )
        found[first].append(place)
    return tuple(map(tuple, found))


def _check_matches(names: Sequence[str], patterns: Sequence[str], matched: Sequence[Sequence[int]]) -> None:
    for pattern, places in zip(patterns, matched, strict=True):
        if places:
            continue
        if any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} of max_norm gets no parameter: patterns before it match all of its names. "
                "Put it before them."
            )
        raise ValueError(
            f"the pattern {pattern!r} of max_norm matches no name. The names are {listed(names) or 'none'}. Correct it "
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
