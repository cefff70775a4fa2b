"""The derivative of clipping for MLX: `mx.grad`, `mx.vjp` and `mx.jvp` use one rule, also under `mx.vmap`.

`mx.vmap` maps `&` and `|` wrongly where only one of their operands has the mapped axis. So it maps no operation here:
each member of the mapped axis is computed by itself.

`mx.compile` compares all pairs of results of such a function, once for each of its arguments: its time grows with the
cube of their number. So the smaller ones of many results are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from gradclip._src.backends.mlx import namespace

_Many = list[mx.array]
_ALONE = 128  # results that are not joined


def call_differentiably(
    function: Callable[..., Any], rule: Any, leaves: Sequence[mx.array], max_norm: mx.array | None, mask: Any = None
) -> tuple[list[mx.array], Any, list[mx.array]]:
    """Call `function`, which returns results, a norm and counts. Its derivative is that of `rule`."""
    if not leaves:
        return function(leaves, max_norm, mask)
    # What a function of MLX's rules captures counts as a constant, so thresholds and masks are arguments.
    given = [*leaves, *(x for x in (max_norm, mask) if x is not None)]
    count, results = len(given), 0

    def apart(given: _Many) -> tuple[_Many, Any, Any]:
        rest = iter(given[len(leaves) :])
        threshold = None if max_norm is None else next(rest)
        return given[: len(leaves)], threshold, None if mask is None else next(rest)

    def place(given: _Many, made: _Many) -> Any:
        xs, threshold, inside = apart(given)
        return rule.at(xs, made[results] if rule.measures else None, threshold, inside)

    @_OneByOne
    def call(given: _Many) -> _Many:
        nonlocal results
        # `mx.jvp` also differentiates what is inside, though it uses the rule. Views of bits have no derivative.
        made, norm, counts = function(*apart(list(map(mx.stop_gradient, given))))
        results = len(made)
        return [*made, *([norm] if rule.measures else []), *counts]

    @_OneByOne
    def vjp(known: _Many) -> _Many:
        given, rest = known[:count], known[count:]
        changes, made = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        gnorm = changes[results] if rule.measures else None
        gxs, gmax = rule.vjp(namespace, place(given, made), changes[:results], gnorm)
        others = [mx.zeros_like(x) for x in given[len(leaves) :]]
        return [*gxs, *others] if max_norm is None else [*gxs, gmax.astype(max_norm.dtype), *others[1:]]

    @_OneByOne
    def jvp(known: _Many) -> _Many:
        given, (dxs, change, _), made = known[:count], apart(known[count : 2 * count]), known[2 * count :]
        dtypes = [x.dtype for x in made[:results]]
        dys, dnorm = rule.jvp(namespace, place(given, made), dxs, 0.0 if change is None else change, dtypes)
        counts = made[results + rule.measures :]
        return [*dys, *([dnorm] if rule.measures else []), *map(mx.zeros_like, counts)]

    @call.joined.jvp
    def _(given: _Many, changes: Sequence[mx.array | None]) -> _Many:
        known = [mx.zeros_like(x) if dx is None else dx for x, dx in zip(given, changes, strict=True)]
        return call.joints.join(jvp([*given, *known, *call(given)]))

    @call.joined.vjp
    def _(given: _Many, changes: _Many, made: _Many) -> _Many:
        return vjp([*given, *call.joints.part(changes), *call.joints.part(made)])

    made = call(given)
    return made[:results], made[results] if rule.measures else None, made[results + rule.measures :]


class _OneByOne:
    """A function of MLX that `mx.vmap` calls for each member of the mapped axis."""

    def __init__(self, function: Callable[[_Many], _Many]) -> None:
        def join(given: _Many) -> _Many:
            made = function(given)
            self.joints = _Joints(made)
            return self.joints.join(made)

        self.joined: Any = mx.custom_function(join)
        self.joined.vmap(self._each)

    def __call__(self, given: _Many) -> _Many:
        made = self.joined(given)
        return self.joints.part(made)

    def _each(self, given: _Many, axes: Sequence[int | None]) -> tuple[_Many, list[int]]:
        (size,) = {x.shape[axis] for x, axis in zip(given, axes, strict=True) if axis is not None}
        # Not x[i]: its derivative ends the process if the array is empty.
        members = [
            [x] * size if axis is None else [one.squeeze(axis) for one in mx.split(x, size, axis)]
            for x, axis in zip(given, axes, strict=True)
        ]
        rows = [self.joined(list(row)) for row in zip(*members, strict=True)]
        return [mx.stack(each) for each in zip(*rows, strict=True)], [0] * len(rows[0])


class _Joints:
    """Which of many arrays are joined: all but the largest, those of one dtype to one."""

    def __init__(self, arrays: _Many) -> None:
        self.shapes = [x.shape for x in arrays]
        order = sorted(range(len(arrays)), key=lambda i: arrays[i].size)
        self.alone, small = order[-_ALONE:], order[:-_ALONE]
        dtypes = dict.fromkeys(arrays[i].dtype for i in small)
        self.groups = [[i for i in small if arrays[i].dtype == dtype] for dtype in dtypes]

    def join(self, arrays: _Many) -> _Many:
        groups = [mx.concatenate([arrays[i].reshape(-1) for i in group]) for group in self.groups]
        return [*(arrays[i] for i in self.alone), *groups]

    def part(self, joined: _Many) -> _Many:
        found = dict(zip(self.alone, joined, strict=False))
        for group, whole in zip(self.groups, joined[len(self.alone) :], strict=True):
            ends = list(accumulate(math.prod(self.shapes[i]) for i in group))
            parts = mx.split(whole, ends[:-1])
            found.update((i, x.reshape(self.shapes[i])) for i, x in zip(group, parts, strict=True))
        return [found[i] for i in range(len(self.shapes))]
