"""Eager JAX calls of every kind: the second one compiles nothing, and its result is that of the first.

Where there are several devices, half of the batches are sharded over them. A third of the calls runs under JAX' strict
promotion of dtypes.
"""

from collections import UserDict
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradclip
from compilations import compiled_in

DTYPES = ("float32", "float16", "bfloat16")
BATCHES = (
    lambda x: x,
    lambda x: {"x": x},
    lambda x: UserDict(x=x),
    lambda x: MappingProxyType({"x": x}),
    lambda x: np.asarray(x, np.float64),
)
SCALES = (
    lambda rng: 1.5,
    lambda rng: np.float64(2.0),
    lambda rng: np.full(1, 0.5),
    lambda rng: jnp.float32(rng.normal()),
    lambda rng: SimpleNamespace(value=jnp.float32(rng.normal())),
)
THRESHOLDS = (0.5, jnp.float32(0.5), np.array(0.5), {"w": 0.5, "b": jnp.float32(1.0)})
SETTINGS = ({}, {"method": "loop"}, {"microbatch_size": 3}, {"method": "loop", "microbatch_size": 2}, {"pad_to": 16})
OF_TREES = (
    lambda t, rng: gradclip.clip_by_global_norm(t, 0.5, ord=float(rng.choice([1, 2, 3, np.inf]))),
    lambda t, rng: gradclip.clip_by_layer_norm(t, 0.5, nonfinite=str(rng.choice(["zero", "drop", "propagate"]))),
    lambda t, rng: gradclip.clip_by_unit_norm(t, 0.5),
    lambda t, rng: gradclip.adaptive_grad_clip(t, t, clipping=0.5),
    lambda t, rng: gradclip.per_example_clip(t, 0.5, per_layer=bool(rng.integers(2))),
    lambda t, rng: gradclip.layer_norms(t),
    lambda t, rng: gradclip.partial_norm(t).clip(t, 0.5),
)


def loss(p, batch, scale):
    rows = jnp.asarray(batch if hasattr(batch, "shape") else batch["x"], jnp.float32)
    factor = jnp.asarray(getattr(scale, "value", scale), jnp.float32)
    return (jnp.tanh(rows @ p["w"] + p["b"]) ** 2 * factor).sum()


def rows_of(rng):
    rows = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
    devices = jax.devices()
    if len(devices) < 2 or rng.integers(2):
        return rows
    return jax.device_put(rows, NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x")))


def on_a_tree(rng):
    call, rows = OF_TREES[rng.integers(len(OF_TREES))], rows_of(rng)
    tree = {str(i): (rows * (i + 1)).astype(rng.choice(DTYPES)) for i in range(rng.integers(1, 4))}
    seed = int(rng.integers(1000))
    return lambda: call(tree, np.random.default_rng(seed))


def on_a_batch(rng):
    threshold = THRESHOLDS[rng.integers(len(THRESHOLDS))]
    setting = SETTINGS[rng.integers(len(SETTINGS))]
    clipped = gradclip.clipped_grad(loss, threshold, batch_argnums=1, **setting)
    weights = {"w": jnp.asarray(rng.normal(size=4), jnp.float32), "b": jnp.float32(0.5)}
    rows, scale = rows_of(rng), SCALES[rng.integers(len(SCALES))](rng)
    batch = BATCHES[rng.integers(len(BATCHES))]
    options = {"mask": np.arange(8) < 6} if rng.integers(2) else {}
    return lambda: clipped(weights, batch(rows), scale, **options)


def attack(rng):
    call = (on_a_tree if rng.integers(2) else on_a_batch)(rng)
    with nullcontext() if rng.integers(3) else jax.numpy_dtype_promotion("strict"):
        first = call()
        call()
        again = []
        compiled = compiled_in(lambda: again.append(call()) or again[0])
    assert compiled == 0, f"{compiled} programs compiled by the third call"
    for one, other in zip(jax.tree.leaves(again[0]), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))
