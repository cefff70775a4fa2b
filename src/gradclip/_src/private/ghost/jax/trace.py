"""Programs of JAX: what an equation computes, the programs within, and which equations a result depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun


def applied(program: Jaxpr, equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of an equation of a program."""
    # A program of one equation keeps its settings, whatever they are in this version of JAX.
    given = {value: x for value, x in zip(equation.invars, inputs, strict=True) if isinstance(value, Var)}
    parts = {"constvars": [], "invars": list(given), "outvars": equation.outvars, "eqns": [equation]}
    alone = program.replace(**parts, effects=equation.effects)
    found: list[Any] = jaxpr_as_fun(ClosedJaxpr(alone, []))(*given.values())
    return found


def differentiated(program: Jaxpr, wanted: Sequence[bool]) -> tuple[set[int], set[Var]]:
    """Return the numbers of the equations, and the variables, on which a derivative of the wanted results depends."""
    values = {value for value, flag in zip(program.outvars, wanted, strict=True) if flag and is_real(value)}
    found = set()
    for i, equation in reversed(list(enumerate(program.eqns))):
        if values.intersection(equation.outvars) and equation.primitive.name != "stop_gradient":
            found.add(i)
            values.update(filter(is_real, equation.invars))
    return found, values


def is_real(value: Var | Literal) -> bool:
    """Say whether a value is a variable that has a derivative."""
    return isinstance(value, Var) and bool(jnp.issubdtype(value.aval.dtype, jnp.inexact))


def inner(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program that an equation only calls, if it does."""
    if equation.primitive.name not in _CALLS:
        return None
    program = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"}
