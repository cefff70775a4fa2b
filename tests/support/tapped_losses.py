"""Losses of one example with parameters in products, and checks of their gradients against `jax.vmap(jax.grad)`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gradclip._src.private.ghost.jax.taps import JaxTaps
from gradclip._src.private.ghost.records import Made, PlacedTerms
from tapped import per_example

BATCH = 5
TAPS = JaxTaps()


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def rows(*shape, seed=1):
    return normal(BATCH, *shape, seed=seed)


def tokens(*shape, vocabulary=7):
    return jnp.asarray(np.random.default_rng(2).integers(0, vocabulary, size=(BATCH, *shape)))


def perceptron(p, x, y):
    h = jax.nn.gelu(x @ p["w"] + p["b"])
    return jnp.sum((jnp.tanh(h @ p["v"]) - y) ** 2)


def perceptron_parameters():
    return {"b": normal(6), "v": normal(6, 3), "w": normal(4, 6)}


def scored(loss):
    """Return a function of one example as `clipped_grad` calls it."""
    return lambda *args: (loss(*args), ())


def found(loss, parameters, *rows):
    return TAPS.uses(scored(loss), 0, (parameters, *rows), (None, *[0] * len(rows)))


def uses(loss, parameters, *rows):
    """Return for each parameter why it cannot be tapped, or the operations and numbers of terms of its uses."""
    return [one.reason or [(use.operation, use.terms) for use in one.uses] for one in found(loss, parameters, *rows)]


def places(loss, parameters, *rows):
    """Return for each parameter the places of its uses: box, view, blocks, rows and columns."""
    every = [[use.place for use in one.uses] for one in found(loss, parameters, *rows)]
    return [[((a.start, a.stop), a.view, a.blocks, a.rows, a.columns) for a in one] for one in every]


quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compile without XLA's slower steps, where what a test compares is how functions are traced."""


def run(fun, axes, tapped, argnums=0):
    """Return a compiled function of the arguments that returns what `JaxTaps.run` does."""
    ran = beside(lambda *args: (), fun, axes, tapped, argnums, jit=jax.jit)
    return lambda *args: ran(*args)[0]


def beside(other, fun, axes, tapped, argnums=0, rest=(), jit=quickly):
    """Return a compiled function of arrays: what `JaxTaps.run` returns for them and `rest`, and what `other` does."""
    static = []

    def arrays(*args):
        found = TAPS.run(fun, argnums, (*args, *rest), axes, tapped)
        places = [None if isinstance(one, Made) else [part.place for part in one] for one in found.gradients]
        static[:] = [places, found.untapped]
        terms = [one if isinstance(one, Made) else [part.terms for part in one] for one in found.gradients]
        return found._replace(gradients=terms, untapped=()), other(*args, *rest)

    program = jit(arrays)

    def call(*args):
        found, others = program(*args)
        pairs = zip(found.gradients, static[0], strict=True)
        made = [one if places is None else list(map(PlacedTerms, places, one)) for one, places in pairs]
        return found._replace(gradients=made, untapped=static[1]), others

    return call


def agrees(loss, parameters, *rows):
    """Check the gradients of each example, and the values. Return the gradients in factors."""
    axes, known = (None, *[0] * len(rows)), found(loss, parameters, *rows)
    usual, tapped = jax.vmap(jax.value_and_grad(loss), axes), [not one.reason for one in known]
    ran, (values, expected) = beside(usual, scored(loss), axes, tapped)(parameters, *rows)
    np.testing.assert_allclose(ran.values, values, rtol=1e-12)
    assert ran.untapped == {}
    for one, gradient, whole in zip(known, ran.gradients, jax.tree.leaves(expected), strict=True):
        assert isinstance(gradient, Made) == bool(one.reason)
        assert (one.shape, one.dtype) == (whole.shape[1:], str(whole.dtype))
        assert np.any(whole) or not (one.uses or one.reason), "nothing to compare"
        close(per_example(gradient, one.shape, len(whole)), whole, one.path)
    return ran.gradients


def close(found, expected, path=""):
    """Compare to 1e-10 of the largest element."""
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape, path
    assert np.abs(found - expected).max(initial=0) <= 1e-10 * np.abs(expected).max(initial=0), path
