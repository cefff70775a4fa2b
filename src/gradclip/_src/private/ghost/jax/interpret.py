"""Compute the program of one example with taps: the inputs of products come out, and zeros with cotangents go in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from gradclip._src.private.ghost.jax.trace import applied, inner
from gradclip._src.private.ghost.jax.uses import Taps, taps_in

Kept = list[tuple[Array, ...]]
"""The inputs that each tap keeps, in the order of the program."""


@jax.custom_jvp
def _tapped(result: Array, zeros: Array) -> Array:
    """Return the result. Its derivative is that of `result + zeros`, which would cost a sum and change -0.0."""
    return result


@_tapped.defjvp
def _(given: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return given[0], tangents[0] + tangents[1]


def computed(program: ClosedJaxpr, inputs: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    """Return the results of a program and what its taps keep. `zeros` has an array for each tap, like its result."""
    known: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known.update(zip(program.jaxpr.invars, inputs, strict=True))
    last = _last_uses(program)
    kept: Kept = []

    def value_of(value: Any) -> Any:
        return known[value] if isinstance(value, Var) else value.val

    for i, equation in enumerate(program.jaxpr.eqns):
        given, tap = [value_of(value) for value in equation.invars], taps.get(i)
        if isinstance(tap, dict):
            name = equation.primitive.name
            found, more = _NESTED.get(name, _called)(equation, given, tap, zeros)
            kept += more
        else:
            found = applied(program.jaxpr, equation, given)
            if tap is not None:
                found = [_tapped(found[0], next(zeros))]
                kept.append(tuple(given[product.kept] for product in tap.products))
        known.update(zip(equation.outvars, found, strict=True))
        for value in last.get(i, ()):
            known.pop(value, None)
    return [value_of(value) for value in program.jaxpr.outvars], kept


def _last_uses(program: ClosedJaxpr) -> dict[int, list[Var]]:
    """Return the variables that are not used after each equation, so that their memory can be used again."""
    after = {value: -1 for value in program.jaxpr.outvars if isinstance(value, Var)}
    last: dict[int, list[Var]] = {}
    for i, equation in reversed(list(enumerate(program.jaxpr.eqns))):
        for value in (*equation.invars, *equation.outvars):
            if isinstance(value, Var) and value not in after:
                after[value] = i
                last.setdefault(i, []).append(value)
    return last


Nested = Callable[[JaxprEqn, Sequence[Any], Taps, Iterator[Array]], tuple[list[Any], Kept]]


def _called(equation: JaxprEqn, given: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    program = inner(equation)
    assert program is not None
    return computed(program, given, taps, zeros)


def _in_scan(equation: JaxprEqn, given: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    settings = equation.params
    first, count = settings["num_consts"], settings["num_carry"]
    begin, rows = list(given[first : first + count]), list(given[first + count :])

    places: list[list[int]] = []

    def body(carry: list[Any], here: tuple[list[Any], list[Array]]) -> Any:
        found, kept = computed(settings["jaxpr"], [*given[:first], *carry, *here[0]], taps, iter(here[1]))
        once = {id(x): x for x in chain(*kept)}  # several taps may keep one array
        places[:] = [[list(once).index(id(x)) for x in one] for one in kept]
        return found[:count], (found[count:], list(once.values()))

    how = {name: settings[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in settings}
    own = [next(zeros) for _ in taps_in(taps)]
    end, (stacked, once) = lax.scan(body, begin, (rows, own), **how)
    return [*end, *stacked], [tuple(once[i] for i in one) for one in places]


def _in_remat(equation: JaxprEqn, given: Sequence[Any], taps: Taps, zeros: Iterator[Array]) -> tuple[list[Any], Kept]:
    def again(given: Sequence[Any], own: Sequence[Array]) -> tuple[list[Any], Kept]:
        return _called(equation, given, taps, iter(own))

    how = {name: equation.params[name] for name in ("prevent_cse", "policy")}
    found: tuple[list[Any], Kept] = jax.checkpoint(again, **how)(list(given), [next(zeros) for _ in taps_in(taps)])
    return found


_NESTED: dict[str, Nested] = {"scan": _in_scan, **dict.fromkeys(("remat2", "checkpoint", "remat"), _in_remat)}
