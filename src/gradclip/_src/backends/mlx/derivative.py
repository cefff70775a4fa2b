"""The derivative of clipping for MLX: `mx.grad`, `mx.vjp` and `mx.jvp` use one rule, also under `mx.vmap`.

`mx.vmap` maps `&` and `|` wrongly where only one of their operands has the mapped axis. So it maps no operation here:
each member of the mapped axis is computed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from gradclip._src.backends.mlx import namespace

_Many = list[mx.array]


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

    @_one_by_one
    def call(given: _Many) -> _Many:
        nonlocal results
        made, norm, counts = function(*apart(given))
        results = len(made)
        return [*made, *([norm] if rule.measures else []), *counts]

    @_one_by_one
    def vjp(known: _Many) -> _Many:
        given, rest = known[:count], known[count:]
        changes, made = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        gnorm = changes[results] if rule.measures else None
        gxs, gmax = rule.vjp(namespace, place(given, made), changes[:results], gnorm)
        others = [mx.zeros_like(x) for x in given[len(leaves) :]]
        return [*gxs, *others] if max_norm is None else [*gxs, gmax.astype(max_norm.dtype), *others[1:]]

    @_one_by_one
    def jvp(known: _Many) -> _Many:
        given, (dxs, change, _), made = known[:count], apart(known[count : 2 * count]), known[2 * count :]
        dtypes = [x.dtype for x in made[:results]]
        dys, dnorm = rule.jvp(namespace, place(given, made), dxs, 0.0 if change is None else change, dtypes)
        counts = made[results + rule.measures :]
        return [*dys, *([dnorm] if rule.measures else []), *map(mx.zeros_like, counts)]

    @call.jvp
    def _(given: _Many, changes: Sequence[mx.array | None]) -> _Many:
        known = [mx.zeros_like(x) if dx is None else dx for x, dx in zip(given, changes, strict=True)]
        return jvp([*given, *known, *call(given)])

    call.vjp(lambda given, changes, made: vjp([*given, *changes, *made]))
    made = call(given)
    return made[:results], made[results] if rule.measures else None, made[results + rule.measures :]


def _one_by_one(function: Callable[[_Many], _Many]) -> Any:
    """Return the function as one of MLX that `mx.vmap` calls for each member of the mapped axis."""
    made = mx.custom_function(function)

    @made.vmap
    def _(given: _Many, axes: Sequence[int | None]) -> tuple[_Many, list[int]]:
        first = [x if axis is None else mx.moveaxis(x, axis, 0) for x, axis in zip(given, axes, strict=True)]
        (size,) = {len(x) for x, axis in zip(first, axes, strict=True) if axis is not None}
        rows = [made([x if axis is None else x[i] for x, axis in zip(first, axes, strict=True)]) for i in range(size)]
        return [mx.stack(each) for each in zip(*rows, strict=True)], [0] * len(rows[0])

    return made
