"""Side by side with `jax_privacy.clipping`: the same trees and table through both, and ours beside float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import clipping as peer

from gradclip.integrations import jax_privacy as ours
from jax_trees import DTYPES, jax_gradients, mode, numbers, peer_ulps
from parity_support import arguments, assert_matches, count_of, reference_clip, reference_norm, tolerance, wide

# The peer calls a function that its own dependency calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning:optax")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_sizes = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
both_scales = pytest.mark.parametrize("rescale", [False, True], ids=["to clip_norm", "to one"])
theirs = jax.jit(peer.clip_pytree, static_argnums=(2, 3))
traced = jax.jit(ours.clip_pytree, static_argnums=(2, 3))


def exact_result(leaves, clip_norm, rescale):
    """Return the table's answer in float64, for trees that are not all zero."""
    if not rescale:
        return reference_clip(leaves, clip_norm)
    return [wide(x) / max(reference_norm(leaves), clip_norm) for x in leaves]


def assert_parity(dtype, tree, clip_norm, rescale, clip=ours.clip_pytree):
    leaves = numbers(tree)
    count = count_of(leaves)
    mine, my_norm = clip(tree, clip_norm, rescale, True)
    their, their_norm = theirs(tree, clip_norm, rescale, True)
    rtol = tolerance(dtype, count, peer_ulps=peer_ulps(dtype, leaves) + rescale)
    exact = exact_result(leaves, clip_norm, rescale)
    for my_leaf, their_leaf, exact_leaf in zip(numbers(mine), numbers(their), exact, strict=True):
        assert_matches(my_leaf, exact_leaf, tolerance(dtype, count), dtype)
        assert_matches(my_leaf, their_leaf, rtol, dtype)
        assert my_leaf.dtype == their_leaf.dtype
    assert my_norm.dtype == their_norm.dtype == np.float32
    assert_matches(my_norm, reference_norm(leaves), 2.0**-24, "float32")
    narrow = dtype if dtype in ("float16", "bfloat16") else "float32"
    assert_matches(their_norm, my_norm, tolerance(narrow, peer_ulps=peer_ulps(dtype, leaves)), narrow)


def test_signature():
    assert arguments(ours.clip_pytree) == arguments(peer.clip_pytree)


@every_dtype
@both_sizes
@both_scales
@pytest.mark.parametrize("clip_norm", [0.25, 64.0], ids=["clipped", "not clipped"])
def test_clip_pytree(dtype, large, rescale, clip_norm):
    with mode(dtype):
        assert_parity(dtype, jax_gradients(dtype, large=large), clip_norm, rescale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@both_scales
@pytest.mark.parametrize("clip_norm", [0.0, 0.25, 64.0, math.inf])
def test_traced(dtype, rescale, clip_norm):
    with mode(dtype):
        assert_parity(dtype, jax_gradients(dtype), clip_norm, rescale, traced)


@both_scales
@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 13.0, 26.0, math.inf])
def test_table(rescale, clip_norm):
    assert_parity("float32", {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}, clip_norm, rescale)


@both_scales
@pytest.mark.parametrize("clip_norm", [0.0, 1.0, math.inf])
def test_zero_norm(rescale, clip_norm):
    zeros = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    for clip in (ours.clip_pytree, traced, theirs):
        clipped, norm = clip(zeros, clip_norm, rescale, True)
        assert [leaf.tolist() for leaf in numbers(clipped)] == [0.0, [0.0, 0.0]]
        assert float(norm) == 0.0


@both_scales
def test_negative_thresholds(rescale):
    tree = [jnp.array([3.0, 4.0])]
    for module in (ours, peer):
        with pytest.raises(ValueError, match=r"negative.*-1\.0"):
            module.clip_pytree(tree, -1.0, rescale)
    # With rescale_to_unit_norm the peer treats a negative threshold as 0, though its table says zeros.
    assert theirs(tree, -1.0, False, True)[0][0].tolist() == [0.0, 0.0]
    assert traced(tree, -1.0, rescale, True)[0][0].tolist() == [0.0, 0.0]


@both_scales
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_safe(rescale, bad):
    tree = [jnp.array([3.0, bad]), jnp.array([4.0])]
    (mine, my_norm), (their, their_norm) = ours.clip_pytree(tree, 1.25, rescale), theirs(tree, 1.25, rescale, True)
    for my_leaf, their_leaf in zip(mine, their, strict=True):
        assert_matches(my_leaf, their_leaf, tolerance("float32", 3, peer_ulps=4.0), "float32")
    assert float(my_norm) == float(their_norm) == 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_without_nan_safe(bad):
    tree = [jnp.array([3.0, bad]), jnp.array([4.0])]
    (mine, my_norm), (their, their_norm) = (clip(tree, 1.0, False, False) for clip in (traced, theirs))
    assert np.isnan(their[0][1])  # what else becomes NaN there depends on the place: 3 becomes 0, 4 becomes 0
    assert all(np.isnan(leaf).all() for leaf in mine)
    assert np.array_equal(my_norm, their_norm, equal_nan=True)


@pytest.mark.parametrize("nan_safe", [True, False])
def test_return_zero_over_a_batch(nan_safe):
    batch = jnp.array([[3.0, 4.0], [math.nan, 1.0], [6.0, 8.0]])
    padding = jnp.array([False, True, False])
    results = []
    for module in (ours, peer):
        clip = jax.vmap(lambda x, zero, clip=module.clip_pytree: clip(x, 2.5, False, nan_safe, zero))
        results.append(jax.jit(clip)(batch, padding))
    (mine, my_norms), (their, their_norms) = results
    assert_matches(mine, their, tolerance("float32", 2, peer_ulps=4.0), "float32")
    assert mine[1].tolist() == [0.0, 0.0]
    assert np.array_equal(my_norms, their_norms, equal_nan=True)


def test_clipped_gradients_of_a_model():
    def loss(params, x):
        return ((params["w"] @ x + params["b"]) ** 2).sum()

    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}
    batch = jax.random.normal(jax.random.key(0), (4, 3))
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    results = []
    for module in (ours, peer):
        clip = jax.vmap(lambda g, clip=module.clip_pytree: clip(g, 0.5))
        results.append(numbers(jax.jit(clip)(grads)[0]))
    for my_leaf, their_leaf in zip(*results, strict=True):
        assert_matches(my_leaf, their_leaf, tolerance("float32", 8, peer_ulps=6.0), "float32")
