"""JAX's own check that no traced array outlives its trace, on every public function."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
import gradclip._src.backends.jax.host as jax_backend
from gradclip._src.inplace.norm import clip_grads_with_norm_

MIXED = {"a": jnp.array([3.0, 4.0]), "n": jnp.array([100]), "z": jnp.ones((2, 2))}
TREE = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones((2, 2), jnp.float16)}
BATCH = {"a": jnp.array([[3.0, 4.0], [0.3, 0.4]]), "b": jnp.ones((2, 3))}
FUNCTIONS = {
    "global_norm": (lambda t, c: gradclip.global_norm(t), TREE),
    "largest": (lambda t, c: gradclip.global_norm(t, "inf"), TREE),
    "layer_norms": (lambda t, c: gradclip.layer_norms(t, 3), TREE),
    "clip_by_global_norm": (lambda t, c: gradclip.clip_by_global_norm(t, c), TREE),
    "known threshold": (lambda t, c: gradclip.clip_by_global_norm(t, 1.0, nonfinite="zero"), TREE),
    "clip_by_layer_norm": (lambda t, c: gradclip.clip_by_layer_norm(t, c), TREE),
    "prefix": (lambda t, c: gradclip.clip_by_layer_norm(t, {"a": c, "b": 2.0}), TREE),
    "integers": (
        lambda t, c: [clip(t, c) for clip in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm)],
        MIXED,
    ),
    "integers, units": (lambda t, c: gradclip.clip_by_unit_norm(t, c), MIXED),
    "clip_by_value": (lambda t, c: gradclip.clip_by_value(t, c), TREE),
    "per_example_clip": (lambda t, c: gradclip.per_example_clip(t, c), BATCH),
    "per_layer": (lambda t, c: gradclip.per_example_clip(t, c, per_layer=True, rule="normalize"), BATCH),
    "to_unit": (lambda t, c: gradclip.per_example_clip(t, c, to_unit=True, nonfinite="propagate"), BATCH),
    "mask": (lambda t, c: gradclip.per_example_clip(t, c, mask=jnp.arange(2) < 1)[0], BATCH),
    "clipped_grad": (
        lambda t, c: gradclip.clipped_grad(lambda w, x: jnp.sum(w * x["a"]), 1.0)(jnp.ones(2) * c, t),
        BATCH,
    ),
}


def total(function):
    return lambda *args: sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(function(*args)))


def everything(threshold, scale):
    scaled = lambda tree: jax.tree.map(lambda x: x * scale.astype(x.dtype), tree)
    return [function(scaled(tree), threshold) for function, tree in FUNCTIONS.values()]


def test_nothing_leaks():
    both = jax.value_and_grad(total(everything), argnums=(0, 1))
    with jax.checking_leaks():
        jax.eval_shape(jax.jit(both), 1.0, jnp.ones(()))
        jax.eval_shape(jax.jit(jax.vmap(everything)), jnp.ones(2), jnp.ones(2))


def test_nothing_leaks_without_the_kernels(monkeypatch):
    monkeypatch.setattr(jax_backend, "usable", lambda leaves: False)
    with jax.checking_leaks():
        jax.eval_shape(jax.jit(everything), 1.0, jnp.ones(()))


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (gradclip.clip_grad_norm_, [0.6, 0.8]),
        (gradclip.clip_grad_layer_norm_, [0.6, 0.8]),
        (gradclip.clip_grad_value_, [1.0, 1.0]),
        (lambda parameters, threshold: clip_grads_with_norm_(parameters, threshold, 10.0), [0.3, 0.4]),
    ],
)
def test_in_place_calls_leak_nothing(clip, expected):
    def clipped(x, threshold):
        parameter = SimpleNamespace(grad=x)
        return clip([parameter], threshold), parameter.grad

    with jax.checking_leaks():
        _, found = jax.jit(clipped)(jnp.array([3.0, 4.0]), 1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
