"""Loops and checkpoints with taps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapped_losses import TAPS, agrees, normal, perceptron, places, rows, scored, tokens, uses


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def recurrent(p, x):
    def step(h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
        return h, h @ p["v"]

    h, made = lax.scan(step, jnp.zeros(3), x)
    return (made**2).sum() + h.sum()


def test_a_constant_of_a_loop_has_a_term_for_each_step():
    p = {"w": normal(4, 3), "u": normal(3, 3), "b": normal(3), "v": normal(3, 2)}
    assert uses(recurrent, p, rows(6, 4)) == ["add", *[[("dot_general", 6)]] * 3]
    agrees(recurrent, p, rows(6, 4))


@pytest.mark.parametrize(("unroll", "reverse"), [(1, False), (2, True)])
def test_a_loop_over_layers_gives_blocks(reverse, unroll):
    def loss(p, x):
        def layer(x, layer):
            w, e = layer
            return jnp.tanh(x @ w.T + p["all"] @ x), e @ x[0]

        x, made = lax.scan(layer, x, (p["w"], p["e"]), reverse=reverse, unroll=unroll)
        return (x**2).sum() + jnp.sin(made).sum()

    p = {"w": normal(4, 3, 3), "e": normal(4, 2, 3), "all": normal(5, 5)}
    assert uses(loss, p, rows(5, 3)) == [[("dot_general", 12)], [("dot_general", 1)], [("dot_general", 5)]]
    whole = ((0, 0, 0), (4, 3, 3))
    assert places(loss, p, rows(5, 3))[2] == [(whole, (4, 3, 3), (0,), (1,), (2,))]
    agrees(loss, p, rows(5, 3))


def test_loops_in_loops():
    """The outer loop goes over layers, the inner one over time; one matrix is used by all, another by each layer."""

    def loss(p, x):
        def layer(x, w):
            def step(h, x):
                return jnp.tanh(x @ p["u"] + w["h"] @ h), h @ w["o"]

            return lax.scan(step, jnp.zeros(3), x)[1] + x @ w["o"], None

        return (lax.scan(layer, x, p["layers"])[0] ** 2).sum()

    p = {"u": normal(3, 3), "layers": {"h": normal(2, 3, 3), "o": normal(2, 3, 3)}}
    found = uses(loss, p, rows(5, 3))
    assert found == [[("dot_general", 5)], [("dot_general", 5), ("dot_general", 5)], [("dot_general", 10)]]
    agrees(loss, p, rows(5, 3))


def test_lookups_in_loops():
    def loss(e, t):
        def step(h, t):
            return jnp.tanh(h * e[t] + e.at[t].get(mode="fill", fill_value=0)), None

        return lax.scan(step, jnp.ones(4), t)[0].sum()

    assert uses(loss, normal(7, 4), tokens(6)) == [[("embedding", 6), ("embedding", 6)]]
    outside = np.asarray(tokens(6)) * 3 - 6
    both = np.concatenate([tokens(6), outside], 1)
    agrees(loss, normal(7, 4), both)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoints(policy):
    def loss(p, x):
        def layer(x, w):
            return jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ p["u"]), policy=policy)(x, w), None

        x = jax.checkpoint(perceptron)(p["dense"], x, x[:, :3]) * x
        return (lax.scan(layer, x, p["w"])[0] ** 2).sum()

    p = {"w": normal(4, 3, 3), "u": normal(3, 3), "dense": {"w": normal(3, 5), "b": normal(5), "v": normal(5, 3)}}
    dense = ["add", [("dot_general", 6)], [("dot_general", 6)]]
    assert uses(loss, p, rows(6, 3)) == [*dense, [("dot_general", 24)], [("dot_general", 6)]]
    agrees(loss, p, rows(6, 3))


def temporary(loss, p, x):
    """Return the bytes of temporary memory of a step whose terms are its results."""

    def made(p, x):
        ran = TAPS.run(scored(loss), 0, (p, x), (None, 0), [True])
        return [part.terms for part in ran.gradients[0]]

    return jax.jit(made).lower(p, x).compile().memory_analysis().temp_size_in_bytes


def test_checkpoints_save_memory():
    """Of eight layers, only what goes in and the cotangents stay; without checkpoints, four values more of each."""
    p, x = normal(8, 64, 64), rows(16, 64)

    def layer(x, w):
        for _ in range(4):
            x = jnp.sin(x) + jnp.sin(x * x)
        return x @ w, None

    def loss(kind):
        return lambda p, x: (lax.scan(kind(layer), x, p)[0] ** 2).sum()

    saved = temporary(loss(lambda layer: jax.checkpoint(layer, prevent_cse=False)), p, x)
    assert temporary(loss(lambda layer: layer), p, x) > 8 * 4 * x.nbytes
    assert saved < 8 * 3 * x.nbytes


def test_zeros_of_loops_take_no_memory():
    """A loop over 32 steps keeps, for each product, its input and cotangent, and for tanh its result."""
    p, x = {"u": normal(64, 64), "w": normal(16, 64)}, rows(32, 16)

    def loss(p, x):
        return lax.scan(lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"]), None), jnp.zeros(64), x)[0].sum()

    def made(p, x):
        ran = TAPS.run(scored(loss), 0, (p, x), (None, 0), [True, True])
        return [part.terms for one in ran.gradients for part in one]

    compiled = jax.jit(made).lower(p, x).compile().memory_analysis()
    states = len(x) * 32 * 64 * 8
    assert compiled.output_size_in_bytes < 3 * states + x.nbytes + 1024
    assert compiled.temp_size_in_bytes < 4.5 * states


def test_an_input_of_several_products_is_stacked_once():
    p, x = {name: normal(64, 64) for name in ("a", "b", "c")}, rows(32, 64)

    def loss(p, x):
        def step(h, x):
            g = jnp.sin(h)
            return jnp.tanh(g @ p["a"]) * jnp.tanh(g @ p["b"]) + jnp.tanh(g @ p["c"]) + x, None

        return lax.scan(step, jnp.zeros(64), x)[0].sum()

    agrees(loss, p, x)

    def made(p, x):
        ran = TAPS.run(scored(loss), 0, (p, x), (None, 0), [True, True, True])
        return [part.terms for one in ran.gradients for part in one]

    memory = jax.jit(made).lower(p, x).compile().memory_analysis()
    # Six results, the state, its derivative, three results of tanh, and two cotangents; three times g would add two.
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 13.1 * x.nbytes
