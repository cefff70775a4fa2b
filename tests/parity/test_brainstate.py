"""Side by side with `brainstate.nn`: the same trees through both, and ours beside float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import nn as peer

from gradclip.integrations import brainstate as ours
from jax_trees import DTYPES, jax_gradients, mode, numbers, peer_ulps
from parity_support import arguments, assert_matches, count_of, reference_clip, reference_norm, tolerance

ADDED = 1e-6  # to the norm, before dividing
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_sizes = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
theirs = jax.jit(peer.clip_grad_norm, static_argnums=(2, 3))


def assert_parity(dtype, tree, max_norm, norm_type=2.0):
    leaves, order = numbers(tree), 2.0 if norm_type is None else float(norm_type)
    norm, count = reference_norm(leaves, order), count_of(leaves)
    mine, my_norm = ours.clip_grad_norm(tree, max_norm, norm_type, True)
    their, their_norm = theirs(tree, max_norm, norm_type, True)
    peers = peer_ulps(dtype, leaves, order)
    to_exact = tolerance(dtype, count, ord=order)
    to_peer = tolerance(dtype, count, ord=order, peer_ulps=peers, shift=ADDED / norm)
    exact = reference_clip(leaves, max_norm, order)
    for my_leaf, their_leaf, exact_leaf in zip(numbers(mine), numbers(their), exact, strict=True):
        assert_matches(my_leaf, exact_leaf, to_exact, dtype)
        assert_matches(my_leaf, their_leaf, to_peer, dtype)
        assert my_leaf.dtype == their_leaf.dtype
    assert_matches(my_norm, norm, tolerance("float64" if dtype in ("float64", "complex128") else "float32"), "float32")
    assert_matches(their_norm, my_norm, to_peer, dtype)


def test_signature():
    assert arguments(ours.clip_grad_norm) == arguments(peer.clip_grad_norm)


@every_dtype
@both_sizes
@pytest.mark.parametrize("max_norm", [0.25, 64.0], ids=["clipped", "not clipped"])
def test_clip_grad_norm(dtype, large, max_norm):
    with mode(dtype):
        assert_parity(dtype, jax_gradients(dtype, large=large), max_norm)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("norm_type", [1, 1.0, 2, 2.5, 3, None, "inf", math.inf, "-inf", -math.inf], ids=repr)
def test_orders(dtype, norm_type):
    with mode(dtype):
        assert_parity(dtype, jax_gradients(dtype), 2.0**-12, norm_type)


@both_sizes
@pytest.mark.parametrize("norm_type", [1, 3, "inf"])
def test_orders_of_large_trees(large, norm_type):
    assert_parity("float32", jax_gradients("float32", large=large), 0.125, norm_type)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_traced(dtype, norm_type):
    def clip(clip_grad_norm):
        return jax.jit(lambda tree, limit: clip_grad_norm(tree, limit, norm_type))(tree, 0.125)

    tree = jax_gradients(dtype)
    leaves = numbers(tree)
    norm = reference_norm(leaves, float(norm_type))
    rtol = tolerance(dtype, count_of(leaves), peer_ulps=peer_ulps(dtype, leaves), shift=ADDED / norm)
    for my_leaf, their_leaf in zip(numbers(clip(ours.clip_grad_norm)), numbers(clip(peer.clip_grad_norm)), strict=True):
        assert_matches(my_leaf, their_leaf, rtol, dtype)


@pytest.mark.parametrize(
    ("tree", "max_norm", "norm_type"),
    [
        ({"w": [3.0, 4.0], "b": [12.0]}, 5.0, 2.0),
        ({"layer1": [[-2.0, 3.0], [1.0, -4.0]]}, 3.0, 2),
        ({"layer1": [[-2.0, 3.0], [1.0, -4.0]]}, 5.0, 1),
        ({"layer1": [[-2.0, 3.0], [1.0, -4.0]]}, 2.0, "inf"),
    ],
)
def test_documented_examples(tree, max_norm, norm_type):
    tree = {name: jnp.array(values) for name, values in tree.items()}
    assert_parity("float32", tree, max_norm, norm_type)


@pytest.mark.parametrize("tree", [{}, [], ((), {"a": None})], ids=repr)
@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_empty_trees(tree, norm_type):
    mine, my_norm = ours.clip_grad_norm(tree, 1.0, norm_type, True)
    their, their_norm = peer.clip_grad_norm(tree, 1.0, norm_type, True)
    assert mine == their == tree
    assert (float(my_norm), my_norm.dtype) == (float(their_norm), their_norm.dtype) == (0.0, np.float32)


@pytest.mark.parametrize("norm_type", ["2", "fro", "nuc"])
def test_refuse_the_same_orders(norm_type):
    for module in (ours, peer):
        with pytest.raises(ValueError, match=norm_type):
            module.clip_grad_norm({"w": jnp.ones(2)}, 1.0, norm_type)
