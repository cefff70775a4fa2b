"""Checks of gradients in factors against `jax.vmap(jax.grad)`."""

import jax
import numpy as np

from gradclip.per_example.ghost.jax_taps import JaxTaps
from gradclip.per_example.ghost.records import Made, Part
from tapped import per_example

TAPS = JaxTaps()


def scored(loss):
    """Return a function of one example as `clipped_grad` calls it."""
    return lambda *args: (loss(*args), ())


def uses(loss, parameters, *rows):
    """Return for each parameter why it cannot be tapped, or the operations and numbers of terms of its uses."""
    found = TAPS.uses(scored(loss), 0, (parameters, *rows), (None, *[0] * len(rows)))
    return [one.reason or [(use.operation, use.terms) for use in one.uses] for one in found]


def places(loss, parameters, *rows):
    """Return for each parameter the places of its uses: box, view, blocks, rows and columns."""
    found = TAPS.uses(scored(loss), 0, (parameters, *rows), (None, *[0] * len(rows)))
    every = [[use.place for use in one.uses] for one in found]
    return [[((a.start, a.stop), a.view, a.blocks, a.rows, a.columns) for a in one] for one in every]


def run(loss, axes, tapped):
    """Return a compiled function of the arguments that returns what `JaxTaps.run` does."""
    static = []

    @jax.jit
    def arrays(*args):
        found = TAPS.run(scored(loss), 0, args, axes, tapped)
        static[:] = [[None if isinstance(one, Made) else [part.place for part in one] for one in found.gradients]]
        terms = [one if isinstance(one, Made) else [part.terms for part in one] for one in found.gradients]
        return found._replace(gradients=terms)

    def call(*args):
        found = arrays(*args)
        pairs = zip(found.gradients, static[0], strict=True)
        made = [one if places is None else list(map(Part, places, one)) for one, places in pairs]
        return found._replace(gradients=made)

    return call


def agrees(loss, parameters, *rows, axes=None):
    """Check the gradients of each example, and the values. Return the gradients in factors."""
    axes = (None, *[0] * len(rows)) if axes is None else axes
    known = TAPS.uses(scored(loss), 0, (parameters, *rows), axes)
    found = run(loss, axes, [not one.reason for one in known])(parameters, *rows)
    values, expected = jax.jit(jax.vmap(jax.value_and_grad(loss), axes))(parameters, *rows)
    np.testing.assert_allclose(found.values, values, rtol=1e-12)
    assert found.untapped == {}
    for one, gradient, whole in zip(known, found.gradients, jax.tree.leaves(expected), strict=True):
        assert isinstance(gradient, Made) == bool(one.reason)
        assert (one.shape, one.dtype) == (whole.shape[1:], str(whole.dtype))
        close(per_example(gradient, one.shape, len(whole)), whole, one.path)
    return found.gradients


def close(found, expected, path=""):
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape, path
    largest = np.abs(expected).max(initial=0)
    assert np.abs(found - expected).max(initial=0) <= 1e-10 * largest, path
