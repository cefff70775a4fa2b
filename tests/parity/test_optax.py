"""Side by side with `optax`: the transformations on the same updates, and ours beside float64."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax as peer
import pytest

from gradclip.integrations import optax as ours
from jax_trees import DTYPES, HALF, jax_gradients, mode, numbers, peer_ulps
from parity_support import (
    arguments,
    assert_matches,
    count_of,
    reference_clip,
    reference_norm,
    tolerance,
    ulps_apart,
    wide,
)

NAMES = (
    "adaptive_grad_clip",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_sizes = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
both_thresholds = pytest.mark.parametrize("threshold", [0.25, 64.0], ids=["clipped", "not clipped"])


def apply(transformation, updates):
    return transformation.update(updates, transformation.init(updates))[0]


@cache
def compiled(name, **options):
    """Return the peer's function, compiled once for all thresholds."""
    if name.startswith("per_example"):
        return jax.jit(partial(getattr(peer, name), **options))
    return jax.jit(lambda updates, threshold: apply(getattr(peer, name)(threshold), updates))


def theirs(name, updates, threshold):
    """Return what the peer makes of the updates, compiled as a whole."""
    return compiled(name)(updates, threshold)


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    more = [("where", None)] if name == "clip_by_global_norm" else []
    assert arguments(getattr(ours, name)) == arguments(getattr(peer, name)) + more


@every_dtype
@both_sizes
@both_thresholds
def test_clip_by_global_norm(dtype, large, threshold):
    with mode(dtype):
        updates = jax_gradients(dtype, large=large)
        mine = numbers(apply(ours.clip_by_global_norm(threshold), updates))
        their = numbers(theirs("clip_by_global_norm", updates, threshold))
    leaves = numbers(updates)
    rtol = tolerance(dtype, count_of(leaves), peer_ulps=peer_ulps(dtype, leaves))
    for my_leaf, their_leaf, exact in zip(mine, their, reference_clip(leaves, threshold), strict=True):
        assert_matches(my_leaf, exact, tolerance(dtype, count_of(leaves)), dtype)
        assert_matches(my_leaf, their_leaf, rtol, dtype)
        assert my_leaf.dtype == their_leaf.dtype


traced = jax.jit(lambda updates, threshold: apply(ours.clip_by_global_norm(threshold), updates))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@both_thresholds
def test_traced_clip_by_global_norm(dtype, threshold):
    with mode(dtype):
        updates = jax_gradients(dtype)
        mine = numbers(traced(updates, threshold))
        their = numbers(theirs("clip_by_global_norm", updates, threshold))
    leaves = numbers(updates)
    rtol = tolerance(dtype, count_of(leaves), peer_ulps=peer_ulps(dtype, leaves))
    for my_leaf, their_leaf in zip(mine, their, strict=True):
        assert_matches(my_leaf, their_leaf, rtol, dtype)


@every_dtype
@both_sizes
@pytest.mark.parametrize("threshold", [2.0**-5, 8.0], ids=["clipped", "not clipped"])
def test_clip_by_block_rms(dtype, large, threshold):
    with mode(dtype):
        updates = jax_gradients(dtype, large=large)
        mine = numbers(apply(ours.clip_by_block_rms(threshold), updates))
        their = numbers(theirs("clip_by_block_rms", updates, threshold))
    for leaf, my_leaf, their_leaf in zip(numbers(updates), mine, their, strict=True):
        rtol = tolerance(dtype, leaf.size, peer_ulps=peer_ulps(dtype, [leaf]))
        limit = threshold * math.sqrt(leaf.size)
        if leaf.size:
            (exact,) = reference_clip([leaf], limit)
            assert_matches(my_leaf, exact, tolerance(dtype, leaf.size), dtype)
        assert_matches(my_leaf, their_leaf, rtol, dtype)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "complex" not in name])
@both_sizes
@pytest.mark.parametrize("limit", [0.0, 0.125, 64.0, math.inf])
def test_clip(dtype, large, limit):
    with mode(dtype):
        updates = jax_gradients(dtype, large=large)
        mine = numbers(apply(ours.clip(limit), updates))
        their = numbers(theirs("clip", updates, limit))
    for my_leaf, their_leaf in zip(mine, their, strict=True):
        assert np.array_equal(my_leaf, their_leaf)


def examples(dtype):
    """Return gradients of seven examples: some all zero, one leaf without elements, one not contiguous."""
    rng = np.random.default_rng(1)
    drawn = {"a": rng.standard_normal((7, 3)), "b": rng.standard_normal((2, 5, 7)).T, "c": rng.standard_normal(7)}
    drawn["none"] = np.zeros((7, 0))
    if "complex" in dtype:
        drawn = {name: x + 1j * rng.standard_normal(x.shape) for name, x in drawn.items()}
    for leaf in drawn.values():
        leaf[2] = 0.0
    return {name: jnp.asarray(x.astype(DTYPES[dtype])) for name, x in drawn.items()}


def reference_sum(leaves, limits):
    """Clip each example by its norm over `leaves`, and add up in float64; return the sums, and those of magnitudes."""
    norms = np.array([reference_norm([x[i] for x in leaves]) for i in range(len(leaves[0]))])
    factor = np.minimum(1.0, np.divide(limits, norms, where=norms > 0, out=np.ones_like(norms)))
    products = [np.tensordot(factor, np.asarray(x).astype(complex), axes=1) for x in leaves]
    sizes = [np.tensordot(factor, np.abs(np.asarray(x)).astype(float), axes=1) for x in leaves]
    real = leaves[0].dtype.kind != "c"
    return [p.real if real else p for p in products], [wide(s if real else s * (1 + 1j)) for s in sizes], norms > limits


def assert_sums(dtype, mine, their, leaves, exact, sizes):
    """Compare sums over seven examples: ours with float64 in float32 at least, the peer's in the leaves' dtype."""
    out = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    count = count_of(leaves) // 7
    rtol = tolerance(dtype, count, peer_ulps=peer_ulps(dtype, leaves) + 7.0)
    for my_sum, their_sum, exact_sum, size in zip(mine, their, exact, sizes, strict=True):
        assert my_sum.dtype == out
        assert_matches(my_sum, exact_sum, tolerance(out, count), out, scale=size)
        assert_matches(my_sum, their_sum, rtol, dtype if dtype in HALF else out, scale=size)


@every_dtype
@pytest.mark.parametrize("limit", [0.5, 3.5, 64.0, math.inf])
def test_per_example_global_norm_clip(dtype, limit):
    with mode(dtype):
        grads = examples(dtype)
        mine, my_count = ours.per_example_global_norm_clip(grads, limit)
        their, their_count = theirs("per_example_global_norm_clip", grads, limit)
    leaves = numbers(grads)
    exact, sizes, over = reference_sum(leaves, limit)
    assert_sums(dtype, numbers(mine), numbers(their), leaves, exact, sizes)
    assert int(my_count) == int(their_count) == over.sum()


@every_dtype
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("limit", [0.5, 64.0])
def test_per_example_layer_norm_clip(dtype, uniform, limit):
    with mode(dtype):
        grads = examples(dtype)
        mine, my_counts = ours.per_example_layer_norm_clip(grads, limit, uniform)
        their, their_counts = compiled("per_example_layer_norm_clip", uniform=uniform)(grads, limit)
    elements = {name: leaf[0].size for name, leaf in grads.items()}
    total = sum(elements.values())
    for name, leaf in grads.items():
        share = 1 / len(grads) if uniform else elements[name] / total
        exact, sizes, over = reference_sum([np.asarray(leaf)], limit * math.sqrt(share))
        assert_sums(dtype, numbers(mine[name]), numbers(their[name]), numbers(leaf), exact, sizes)
        assert int(my_counts[name]) == int(their_counts[name]) == over.sum()


@pytest.mark.parametrize("limit", [math.inf, 0.0, 1.25])
@pytest.mark.parametrize("name", NAMES[4:])
def test_documented_examples(name, limit):
    grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    mine, my_count = getattr(ours, name)(grads, limit)
    their, their_count = getattr(peer, name)(grads, limit)
    assert_matches(mine[0], their[0], tolerance("float32", 3, peer_ulps=4.0), "float32")
    assert mine[0].dtype == their[0].dtype
    assert jax.tree.map(int, my_count) == jax.tree.map(int, their_count)


@pytest.mark.parametrize("name", NAMES[4:])
def test_refuse_the_same_shapes(name):
    for module in (ours, peer):
        with pytest.raises(ValueError, match=r"0th axis|axis 0"):
            getattr(module, name)([jnp.ones((2, 2)), jnp.ones(3)], 1.0)


def test_chain_takes_the_same_steps():
    updates = jax_gradients("float32")
    params = jax.tree.map(jnp.ones_like, updates)
    results = []
    for module in (ours, peer):
        optimizer = peer.chain(module.clip_by_global_norm(0.5), peer.adam(0.1))
        moved, state = params, optimizer.init(params)
        for _ in range(2):
            steps, state = jax.jit(optimizer.update)(updates, state, moved)
            moved = peer.apply_updates(moved, steps)
        results.append(numbers(moved))
    for my_leaf, their_leaf in zip(*results, strict=True):
        assert_matches(my_leaf, their_leaf, tolerance("float32", 73, peer_ulps=6.0), "float32")


def clip_adaptively(library, axis, updates, params):
    transformation = library.adaptive_grad_clip(0.1, axis=axis)
    return transformation.update(updates, transformation.init(params), params)[0]


@cache
def adaptively_clipped(library, axis):
    """Return the same, compiled once for all dtypes that are tested with it."""
    return jax.jit(partial(clip_adaptively, library, axis))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [None, (0, 1)], ids=["layouts", "axis"])
def test_adaptive_grad_clip_within_four_units_in_the_last_place(dtype, axis):
    shapes = [(5, 9), (4, 3, 5), (3, 3, 4, 6), (2, 3, 2, 4, 3)]
    shapes += [] if axis else [(), (7,), (1, 6)]
    rng = np.random.default_rng(11)

    def drawn(shape):
        return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 2, size=shape[-1:])).astype(DTYPES[dtype])

    params, updates = (list(map(drawn, shapes)) for _ in range(2))

    def given(dtype):
        return [[jnp.asarray(x, dtype) for x in tree] for tree in (updates, params)]

    with jax.enable_x64(True):
        exact = numbers(adaptively_clipped(peer, axis)(*given(jnp.float64)))
    with mode(dtype):
        mine = [
            numbers(of(*given(DTYPES[dtype])))
            for of in (partial(clip_adaptively, ours, axis), adaptively_clipped(ours, axis))
        ]
        theirs = numbers(adaptively_clipped(peer, axis)(*given(jnp.float64 if dtype == "float64" else jnp.float32)))
    for results in mine:
        for result, expected, their, old in zip(results, exact, theirs, updates, strict=True):
            assert result.dtype == old.dtype
            # In float64 a norm and a threshold are lowered by more than a unit, so that the bound holds.
            lowered = 2 * old.size + 64 if dtype == "float64" else 0
            assert ulps_apart(result, expected, dtype) <= 4 + lowered
            assert ulps_apart(result, their, dtype) <= 6 + lowered  # optax rounds three times itself
        assert sum(not np.array_equal(result, old) for result, old in zip(results, updates, strict=True)) > 2
