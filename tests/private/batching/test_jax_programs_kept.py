"""Eager calls compile once for each kind of argument, and keep nothing of later calls."""

from collections import OrderedDict, UserDict
from types import MappingProxyType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import gradclip
from compilations import compiled_in, kept_by
from gradclip.integrations import optax as ours

# One program kept for each call would take 100 MB.
MOST_BYTES = 8e6

ROWS = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.float32)
WEIGHTS = {"w": jnp.linspace(-1.0, 1.0, 4), "b": jnp.float32(0.25)}
TREE = {"a": ROWS, "b": jnp.ones(4, jnp.bfloat16)}
SETTINGS = {"loop": {"method": "loop"}, "micro": {"microbatch_size": 4}, "both": {"method": "loop", "pad_to": 8}}


def loss(p, rows, scale=1.0):
    scale = getattr(scale, "value", scale)
    rows = rows if hasattr(rows, "shape") else rows["x"]
    return (jnp.tanh(rows @ p["w"] + p["b"]) ** 2 * scale).sum()


def of(max_norm=0.5, **settings):
    return gradclip.clipped_grad(loss, max_norm, batch_argnums=1, **settings)


# Found again by their arguments alone. The keywords vary, so that no object is found again by its identity.
FOUND = {
    "plain": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS + i), {})),
    "jax threshold": lambda s: (of(jnp.float32(0.5), **s), lambda i: ((WEIGHTS, ROWS), {})),
    "dict": lambda s: (of(**s), lambda i: ((WEIGHTS, OrderedDict(x=ROWS)), {})),
    "numpy rows": lambda s: (of(**s), lambda i: ((WEIGHTS, np.asarray(ROWS, np.float64) * i), {})),
    "scalar": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS, np.float64(3.0)), {})),
    "array": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS, jnp.float32(i)), {})),
    "mask": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS), {"mask": np.arange(6) != i % 6})),
}
# Traced again at each call.
TRACED = {
    "numpy threshold": lambda s: (of(np.array(0.5), **s), lambda i: ((WEIGHTS, ROWS), {})),
    "numpy tree": lambda s: (of({"w": np.array(0.5), "b": np.array(1.0)}, **s), lambda i: ((WEIGHTS, ROWS), {})),
    "mapping": lambda s: (of(**s), lambda i: ((WEIGHTS, UserDict(x=ROWS * i)), {})),
    "proxy": lambda s: (of(**s), lambda i: ((WEIGHTS, MappingProxyType({"x": ROWS})), {})),
    "numpy array": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS, np.linspace(0.0, 1.0, 6)), {})),
    "object": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS, SimpleNamespace(value=2.0)), {})),
    "object of arrays": lambda s: (of(**s), lambda i: ((WEIGHTS, ROWS, SimpleNamespace(value=jnp.float32(i))), {})),
}


def setting_of(kind, kinds):
    """Return one of the settings; neighbours have different ones."""
    return list(SETTINGS.values())[list(kinds).index(kind) % len(SETTINGS)]


def repeated(clipped, arguments):
    numbers = iter(range(10_000))

    def call():
        args, kwargs = arguments(next(numbers))
        return clipped(*args, **kwargs)

    return call


@pytest.mark.parametrize("kind", FOUND)
def test_calls_found_by_their_arguments(kind):
    call = repeated(*FOUND[kind](setting_of(kind, FOUND)))
    assert compiled_in(call) > 0
    compiled, held = kept_by(call, 50)
    assert (compiled, held < MOST_BYTES) == (0, True)


@pytest.mark.parametrize("kind", TRACED)
def test_calls_traced_again(kind):
    call = repeated(*TRACED[kind](setting_of(kind, TRACED)))
    compiled, held = kept_by(call, 12)
    assert (compiled, held < MOST_BYTES) == (0, True)


def test_what_is_traced_again_sees_new_values():
    here = SimpleNamespace(value=1.0)
    clipped = of(1e6, method="loop")
    first = clipped(WEIGHTS, ROWS, here)["w"]
    here.value = 3.0
    np.testing.assert_allclose(clipped(WEIGHTS, ROWS, here)["w"], 3 * first, rtol=1e-5)
    threshold = np.array(1e-3)
    clipped = of(threshold, method="loop")
    first = clipped(WEIGHTS, ROWS)["w"]
    threshold[...] = 2e-3
    np.testing.assert_allclose(clipped(WEIGHTS, ROWS)["w"], 2 * first, rtol=1e-5)


def test_results_of_a_kind_are_not_those_of_another():
    outputs = {"name": "a"}
    clipped = gradclip.clipped_grad(
        lambda p, x, o: ((x @ p["w"]).sum() + p["b"], {outputs["name"]: x.sum()}),
        1.0,
        batch_argnums=1,
        has_aux=True,
        method="loop",
    )
    for name in ("a", "b", "a"):
        outputs["name"] = name
        _, made = clipped(WEIGHTS, ROWS, object())
        assert list(made.aux) == [name]


def test_callbacks_are_those_of_the_call():
    here = SimpleNamespace(value=1.0)

    def calling(p, x, o):
        number = np.float32(o.value)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return (x @ p["w"]).sum() * jax.pure_callback(lambda: number, shape, vmap_method="sequential")

    clipped = gradclip.clipped_grad(calling, 1e6, batch_argnums=1, method="loop")
    first = clipped(WEIGHTS, ROWS, here)["w"]
    here.value = 2.0
    np.testing.assert_allclose(clipped(WEIGHTS, ROWS, here)["w"], 2 * first, rtol=1e-6)


@pytest.mark.parametrize("committed", [False, True])
def test_devices_have_programs_of_their_own(committed):
    rows = jax.device_put(ROWS, jax.devices()[0]) if committed else ROWS
    clipped = of(method="loop")
    made = [clipped(WEIGHTS, rows, SimpleNamespace(value=1.0))["w"] for _ in range(2)]
    assert made[0].committed == made[1].committed == committed
    np.testing.assert_array_equal(*made)


ADAPTIVE, SKIPPING = ours.adaptive_clip_by_global_norm(), ours.skip_spikes(optax.adam(1e-3))
STATES = ADAPTIVE.init(TREE), SKIPPING.init(TREE)
OF_TREES = {
    "global": lambda: gradclip.clip_by_global_norm(TREE, 1.0),
    "global, zero": lambda: gradclip.clip_by_global_norm(TREE, jnp.float32(0.5), nonfinite="zero", ord=3),
    "layer": lambda: gradclip.clip_by_layer_norm(TREE, {"a": 1.0, "b": np.array(0.5)}),
    "value": lambda: gradclip.clip_by_value(TREE, 0.1),
    "norm": lambda: gradclip.global_norm(TREE, "inf"),
    "norms": lambda: gradclip.layer_norms(TREE),
    "unit": lambda: gradclip.clip_by_unit_norm(TREE, 0.1),
    "agc": lambda: gradclip.adaptive_grad_clip(TREE, TREE, clipping=0.1),
    "parts": lambda: gradclip.partial_norm(TREE).clip(TREE, 0.1),
    "examples": lambda: gradclip.per_example_clip({"a": ROWS}, 0.5, mask=np.arange(6) < 5),
    "sparse": lambda: gradclip.clip_by_global_norm(sparse.BCOO.fromdense(ROWS), 0.1),
    "adaptive": lambda: ADAPTIVE.update(TREE, STATES[0]),
    "spikes": lambda: SKIPPING.update(TREE, STATES[1], TREE),
    "vmap": lambda: jax.vmap(lambda x: gradclip.per_example_clip(x, 0.1))(ROWS.reshape(2, 3, 4)),
    "derivative": lambda: jax.grad(lambda x: gradclip.clip_by_global_norm(x, 0.1)[0]["a"].sum())(TREE),
}


@pytest.mark.parametrize("name", OF_TREES)
def test_calls_on_trees(name):
    compiled, held = kept_by(OF_TREES[name], 50 if name != "derivative" else 12)
    assert (compiled, held < MOST_BYTES) == (0, True)
