"""Eager calls on arrays of several devices compile once, and keep nothing of later calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import gradclip
from compilations import compiled_in, kept_by
from sharded_jax.layouts import AxisType, P, mesh_of

MOST_BYTES = 8e6


def tree_on(kind):
    mesh = mesh_of((8,), kind)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    rows = put(jnp.arange(64.0).reshape(16, 4) / 7, P("x"))
    return {"rows": rows, "half": put(jnp.ones(16, jnp.bfloat16), P("x")), "same": put(jnp.ones((16, 2)), P())}


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).sum()


LOOP, VMAP = (gradclip.clipped_grad(loss, 0.5, method=method) for method in ("loop", "materialize"))
CALLS = {
    "global": lambda t: gradclip.clip_by_global_norm(t, 1.0),
    "tiny": lambda t: gradclip.clip_by_global_norm(jax.tree.map(lambda x: x * 1e-36, t), 1e-38, ord=3),
    "layer": lambda t: gradclip.clip_by_layer_norm(t, 0.5, nonfinite="drop"),
    "norms": lambda t: gradclip.layer_norms(t, 1),
    "value": lambda t: gradclip.clip_by_value(t, 0.5),
    "unit": lambda t: gradclip.clip_by_unit_norm(t, 0.5),
    "agc": lambda t: gradclip.adaptive_grad_clip(t, t, clipping=0.1),
    "parts": lambda t: gradclip.partial_norm(t).clip(t, 0.5),
    "examples": lambda t: gradclip.per_example_clip(t, 0.5, per_layer=True),
    "loop": lambda t: LOOP(jnp.ones(4), t["rows"]),
    "vmap": lambda t: VMAP(jnp.ones(4), t["rows"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_compiled_again(name):
    tree = tree_on(AxisType.Auto)
    compiled, held = kept_by(lambda: CALLS[name](tree), 20)
    assert (compiled, held < MOST_BYTES) == (0, True)


def test_complex_numbers_beyond_the_range_of_squares():
    with jax.enable_x64(True):
        (x,) = (jax.device_put(np.full(8, 1e300 + 1e300j), NamedSharding(mesh_of((8,), AxisType.Auto), P("x"))),)
        assert float(gradclip.global_norm(x)) == pytest.approx(4e300)
        assert kept_by(lambda: gradclip.clip_by_global_norm(x, 1.0), 5)[0] == 0


@pytest.mark.parametrize("method", ["loop", "materialize"])
def test_a_program_that_is_found_by_its_text_is_that_of_the_device(method):
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    scale = np.full(1, 2.0)  # float64, which no key holds
    clipped = gradclip.clipped_grad(lambda w, x, s: (x @ w).sum() * s[0], 0.5, method=method, batch_argnums=1)
    for device in [*jax.devices()[:2], *jax.devices()[:2]]:
        w, x = (jax.device_put(one, device) for one in (jnp.ones(4), rows))
        found = clipped(w, x, scale)
        assert found.devices() == {device}


def gradient(tree):
    def value(tree):
        return sum(jnp.sum(x) ** 2 for x in gradclip.clip_by_global_norm(tree, 0.5, axis_name="x")[0])

    return jax.grad(value)(tree)


INSIDE = {
    "global": (8, lambda t: gradclip.clip_by_global_norm(t, 0.5, axis_name="x")[0]),
    "order 3": (8, lambda t: gradclip.clip_by_global_norm(t, 0.5, ord=3, axis_name="x")[0]),
    "layer": (10, lambda t: gradclip.clip_by_layer_norm(t, 0.5, axis_name="x")[0]),
    "gradient": (60, gradient),
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_eager_shard_map_compiles_few_programs(name):
    most, call = INSIDE[name]
    mesh, tree = mesh_of((8,), AxisType.Auto), [jnp.linspace(-1.0, 2.0, 16), jnp.ones((8, 2), jnp.bfloat16)]

    def run():
        return jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(tree)

    expected = jax.jit(run)()
    assert compiled_in(run) <= most
    for ours, known in zip(run(), expected, strict=True):
        np.testing.assert_allclose(ours.astype(float), known.astype(float), rtol=1e-5)
