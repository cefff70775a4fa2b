"""`adaptive_grad_clip` as a transformation: its bound in exact arithmetic, its axes, and what it refuses."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradclip.integrations.optax import adaptive_grad_clip
from parity_support import REQUIRED, arguments
from rational import power_of_norm

PARAMS = {"w": jnp.array([[6.0, 60.0], [8.0, 80.0]]), "b": jnp.array([0.0, 0.0])}
UPDATES = {"w": jnp.array([[3.0, 0.5], [4.0, 0.5]]), "b": jnp.array([3.0, 4.0])}


def clipped(updates, params, *args, **kwargs):
    transformation = adaptive_grad_clip(*args, **kwargs)
    return transformation.update(updates, transformation.init(params), params)[0]


def test_signature_and_state():
    assert arguments(adaptive_grad_clip) == [("clipping", REQUIRED), ("eps", 1e-3), ("axis", None)]
    transformation = adaptive_grad_clip(0.1)
    assert transformation.init(PARAMS) == optax.EmptyState()
    assert transformation.update(UPDATES, "a state of others", PARAMS)[1] == "a state of others"


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_by_hand(way):
    found = way(lambda u, p: clipped(u, p, 0.1))(UPDATES, PARAMS)
    assert np.allclose(found["w"], [[0.6, 0.5], [0.8, 0.5]], rtol=1e-6)
    assert np.allclose(found["b"], [6e-5, 8e-5], rtol=1e-6)


def test_in_a_chain_whose_settings_are_traced():
    transformation = optax.chain(optax.inject_hyperparams(adaptive_grad_clip)(clipping=0.1), optax.sgd(1.0))
    state = transformation.init(PARAMS)
    found, _ = jax.jit(transformation.update)(UPDATES, state, PARAMS)
    assert np.allclose(found["w"], [[-0.6, -0.5], [-0.8, -0.5]], rtol=1e-6)


@pytest.mark.parametrize("axis", [None, 0, (0, 2), (1, -1)])
def test_the_bound_holds_exactly(axis):
    rng = np.random.default_rng(2)
    update, param = (jnp.asarray(rng.normal(size=(3, 4, 5)) * 10.0 ** rng.integers(-4, 3), jnp.float32) for _ in "ab")
    found = np.asarray(clipped(update, param, 0.3, axis=axis))
    shared = {None: (0,), 0: (0,), (0, 2): (0, 2), (1, -1): (1, 2)}[axis]
    own = [x for x in range(3) if x not in shared]
    rows = [np.moveaxis(np.asarray(x), own, range(len(own))) for x in (found, param)]
    for at in np.ndindex(*rows[0].shape[: len(own)]):
        limit = Fraction(0.3) ** 2 * max(power_of_norm([rows[1][at]], 2), Fraction(1e-3) ** 2)
        assert power_of_norm([rows[0][at]], 2) <= limit


def test_all_leaves_need_the_axis_that_is_named():
    assert np.allclose(clipped(UPDATES, PARAMS, 0.1, axis=0)["b"], [6e-5, 8e-5], rtol=1e-6)
    with pytest.raises(ValueError, match=r"axis is 1, but \['b'\] of shape \(2,\) has no such axis"):
        clipped(UPDATES, PARAMS, 0.1, axis=1)


def test_errors():
    for arguments_ in ((-1.0,), (math.nan,), (0.1, -1.0)):
        with pytest.raises(ValueError, match="must not be negative or NaN"):
            adaptive_grad_clip(*arguments_)
    with pytest.raises(ValueError, match="compares updates with parameters"):
        adaptive_grad_clip(0.1).update(UPDATES, optax.EmptyState())
    with pytest.raises(ValueError, match="same structure"):
        clipped(UPDATES, {"w": PARAMS["w"]}, 0.1)
