"""Programs of JAX are evaluated equation by equation, and say what their results depend on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from gradclip._src.private.ghost.jax.uses import applied, differentiated, inner, is_real


@jax.custom_vjp
def tripled(x):
    return x


tripled.defvjp(lambda x: (x, ()), lambda kept, e: (3 * e,))


def by_equations(function, *args):
    """Return the results of a function of which each equation is evaluated alone."""
    closed = jax.make_jaxpr(function)(*args)

    def call(*args):
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, args, strict=True))
        for equation in closed.jaxpr.eqns:
            inputs = [value.val if isinstance(value, Literal) else known[value] for value in equation.invars]
            known.update(zip(equation.outvars, applied(closed.jaxpr, equation, inputs), strict=True))
        return known[closed.jaxpr.outvars[0]]

    return call


def many(x):
    y = tripled(x) + jax.nn.relu(x) * jax.nn.logsumexp(x) + x * x
    y = lax.cond(y[0] > 0, jnp.sin, jnp.cos, y)
    y = lax.fori_loop(0, 3, lambda i, y: y * 0.5 + i, y)
    first, _ = jnp.split(jax.jit(jnp.sort)(y), [2])
    return jnp.sum(first) + lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)


def test_equations_keep_their_rules_of_derivatives():
    x = jnp.asarray([0.3, -0.2, 0.5])
    one = by_equations(many, x)
    found, expected = (jax.jit(jax.vmap(jax.value_and_grad(f)))(jnp.stack([x, 2 * x])) for f in (one, many))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_a_derivative_depends_on():
    def function(x, y):
        lost = lax.stop_gradient(jnp.exp(x))
        place = jnp.argmax(jnp.cos(x))
        return jnp.sin(x) * y[place] + lost, jnp.tanh(y)

    program = jax.make_jaxpr(function)(jnp.ones(3), jnp.ones(3)).jaxpr

    def names(*wanted):
        found, values = differentiated(program, wanted)
        assert program.invars[0] in values or not wanted[0]
        return {program.eqns[i].primitive.name for i in found}

    first, second = names(True, False), names(False, True)
    assert {"sin", "mul", "add"} <= first
    assert second == {"tanh"}
    assert not {"exp", "cos", "argmax", "stop_gradient", "tanh"} & first
    assert names(False, False) == set()


def test_programs_that_are_only_called():
    def function(x):
        y = jax.jit(jnp.sin)(x)
        return jax.checkpoint(lambda y: jnp.cos(y))(y), lax.fori_loop(0, 3, lambda i, x: x * 2, x)

    program = jax.make_jaxpr(function)(1.0).jaxpr
    found = {equation.primitive.name: inner(equation) for equation in program.eqns}
    assert [one.eqns[0].primitive.name for one in found.values() if one] == ["sin", "cos"]
    assert found["scan"] is None


def test_variables_of_floating_point_are_real():
    program = jax.make_jaxpr(lambda x, i: x * 2.0 + i)(1.0, 1).jaxpr
    assert list(map(is_real, program.invars)) == [True, False]
    literals = [value for equation in program.eqns for value in equation.invars if hasattr(value, "val")]
    assert literals
    assert not any(map(is_real, literals))
