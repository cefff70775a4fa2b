"""The transformations of `optax`: signatures, values worked out by hand, chains, `jit` and injected thresholds."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradclip.integrations.optax import clip, clip_by_block_rms, clip_by_global_norm
from parity_support import REQUIRED, arguments, assert_just_below

THREE_FOUR = {"w": jnp.array([3.0]), "b": (jnp.array([[4.0]]), None)}


def apply(transformation, updates):
    """Return what one update makes of `updates`."""
    return transformation.update(updates, transformation.init(updates))[0]


def eager(make, updates, threshold):
    return apply(make(threshold), updates)


traced = jax.jit(eager, static_argnums=0)
both_ways = pytest.mark.parametrize("call", [eager, traced], ids=["eager", "jit"])


def numbers(tree):
    return [np.asarray(leaf).ravel().tolist() for leaf in jax.tree.leaves(tree)]


def test_signatures():
    assert arguments(clip_by_global_norm) == [("max_norm", REQUIRED), ("where", None)]
    assert arguments(clip) == [("max_delta", REQUIRED)]
    assert arguments(clip_by_block_rms) == [("threshold", REQUIRED)]


@pytest.mark.parametrize("make", [clip_by_global_norm, clip, clip_by_block_rms])
def test_is_a_transformation_without_state(make):
    transformation = make(1.0)
    assert isinstance(transformation, optax.GradientTransformation)
    assert transformation.init(THREE_FOUR) == optax.EmptyState()
    _, state = transformation.update(THREE_FOUR, "a state of others", params=None)
    assert state == "a state of others"


@both_ways
def test_global_norm(call):
    clipped = call(clip_by_global_norm, THREE_FOUR, 1.0)
    assert jax.tree.structure(clipped) == jax.tree.structure(THREE_FOUR)
    assert_just_below(clipped["w"], [0.6], "float32")
    assert_just_below(clipped["b"][0], [[0.8]], "float32")


@both_ways
@pytest.mark.parametrize("max_norm", [6.0, math.inf])
def test_global_norm_that_is_small_enough(call, max_norm):
    assert numbers(call(clip_by_global_norm, THREE_FOUR, max_norm)) == [[4.0], [3.0]]


@both_ways
@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_block_rms, clip])
def test_threshold_zero(call, make):
    assert numbers(call(make, {"w": jnp.array([3.0, -4.0]), "b": jnp.zeros(2)}, 0.0)) == [[0.0, 0.0], [0.0, 0.0]]


def test_global_norm_at_the_threshold_is_decided_exactly():
    assert numbers(apply(clip_by_global_norm(5.0), THREE_FOUR)) == [[4.0], [3.0]]


@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_block_rms, clip])
def test_traced_negative_threshold_gives_zeros(make):
    assert numbers(traced(make, {"w": jnp.array([3.0, -4.0])}, -1.0)) == [[0.0, 0.0]]


@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_block_rms, clip])
@pytest.mark.parametrize("threshold", [-1.0, math.nan, jnp.array(-1.0)], ids=["negative", "nan", "array"])
def test_negative_and_nan_thresholds(make, threshold):
    with pytest.raises(ValueError, match="must not be negative or NaN"):
        apply(make(threshold), THREE_FOUR)


def test_error_names_the_threshold_that_was_passed():
    with pytest.raises(ValueError, match=r"got -1\.0"):
        apply(clip_by_block_rms(-1.0), THREE_FOUR)


@both_ways
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_are_kept(call, dtype):
    updates = [jnp.array([3.0], dtype), jnp.array([4.0])]
    first, second = call(clip_by_global_norm, updates, 1.0)
    assert (first.dtype, second.dtype) == (jnp.dtype(dtype), jnp.float32)
    assert_just_below(first, np.array([0.6 + 0j] if dtype == "complex64" else [0.6]), dtype)
    assert_just_below(second, [0.8], "float32")


@both_ways
def test_half_precision_norms_do_not_overflow(call):
    clipped = call(clip_by_global_norm, jnp.array([3e4, 4e4], jnp.float16), 5.0)
    assert_just_below(clipped, [3.0, 4.0], "float16")


@both_ways
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_updates_are_seen_everywhere(call, bad):
    clipped = call(clip_by_global_norm, [jnp.array([bad, 1.0]), jnp.array([2.0])], 1.0)
    assert all(np.isnan(leaf).all() for leaf in clipped)


def test_empty_tree():
    assert apply(clip_by_global_norm(1.0), ()) == ()


@both_ways
def test_block_rms(call):
    # The root mean square of 3 and 4 is 5 / sqrt(2); that of 0.5 is below 1.
    updates = {"w": jnp.array([[3.0, 4.0]]), "b": jnp.array(0.5), "none": jnp.zeros(0)}
    clipped = call(clip_by_block_rms, updates, 1.0)
    assert_just_below(clipped["w"], [[0.6 * math.sqrt(2), 0.8 * math.sqrt(2)]], "float32")
    assert numbers([clipped["b"], clipped["none"]]) == [[0.5], []]


@both_ways
def test_block_rms_without_limit(call):
    updates = {"w": jnp.array([3.0, 4.0]), "none": jnp.zeros(0)}
    assert numbers(call(clip_by_block_rms, updates, math.inf)) == [[], [3.0, 4.0]]


@both_ways
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_clip(call, dtype):
    clipped = call(clip, {"w": jnp.array([3.0, -4.0, 0.5, math.nan, math.inf], dtype)}, 1.0)
    assert clipped["w"].dtype == dtype
    assert str(numbers(clipped)) == "[[1.0, -1.0, 0.5, nan, 1.0]]"


def test_clip_refuses_complex_updates():
    with pytest.raises(TypeError, match="complex numbers have no order"):
        apply(clip(1.0), jnp.array([3 + 4j]))


@pytest.mark.parametrize("jit", [False, True])
def test_in_a_chain(jit):
    optimizer = optax.chain(clip_by_global_norm(2.5), optax.sgd(2.0))
    params = {"w": jnp.array([1.0, 1.0])}
    update = jax.jit(optimizer.update) if jit else optimizer.update
    updates, _ = update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
    assert_just_below(updates["w"], [-3.0, -4.0], "float32")
    assert_just_below(optax.apply_updates(params, updates)["w"] - 1.0, [-3.0, -4.0], "float32")


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("make", "name"), [(clip_by_global_norm, "max_norm"), (clip_by_block_rms, "threshold"), (clip, "max_delta")]
)
def test_injected_threshold_can_be_changed(make, name, jit):
    updates = {"w": jnp.array([4.0])}
    transformation = optax.inject_hyperparams(make)(**{name: 2.0})
    update = jax.jit(transformation.update) if jit else transformation.update
    clipped, state = update(updates, transformation.init(updates))
    assert_just_below(clipped["w"], [2.0], "float32")
    state.hyperparams[name] = jnp.asarray(8.0)
    clipped, state = update(updates, state)
    assert numbers(clipped) == [[4.0]]


def test_injected_schedule():
    updates = {"w": jnp.array([3.0, 4.0])}
    transformation = optax.inject_hyperparams(clip_by_global_norm)(max_norm=optax.linear_schedule(2.5, 5.5, 2))
    update = jax.jit(transformation.update)
    state = transformation.init(updates)
    for expected in ([1.5, 2.0], [2.4, 3.2]):
        clipped, state = update(updates, state)
        assert_just_below(clipped["w"], expected, "float32")
    assert numbers(update(updates, state)[0]) == [[3.0, 4.0]]


def test_masked_clips_only_what_the_mask_selects():
    transformation = optax.masked(clip_by_global_norm(1.0), {"a": True, "b": False})
    clipped = apply(transformation, {"a": jnp.array([3.0, 4.0]), "b": jnp.array([30.0])})
    assert_just_below(clipped["a"], [0.6, 0.8], "float32")
    assert clipped["b"].tolist() == [30.0]


def test_gradient_through_an_update_is_finite_at_zero():
    slope = jax.jit(jax.grad(lambda updates: apply(clip_by_global_norm(1.0), updates).sum()))
    assert slope(jnp.zeros(2)).tolist() == [1.0, 1.0]
    # y = x / |x|, whose derivative at (3, 4) is (16, -12; -12, 9) / 125: its columns add up to 4/125 and -3/125.
    slopes = slope(jnp.array([3.0, 4.0])).tolist()
    assert slopes == pytest.approx([0.032, -0.024], abs=4 * 2.0**-24)


def test_trains_a_line():
    optimizer = optax.chain(clip_by_global_norm(0.5), optax.sgd(1.0))
    x = jnp.array([1.0, 2.0, 3.0])

    def loss(params):
        return ((params["slope"] * x - 4.0 * x) ** 2).sum()

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = {"slope": jnp.array(0.0)}
    state = optimizer.init(params)
    slopes = []
    for _ in range(3):
        params, state = step(params, state)
        slopes.append(float(params["slope"]))
    assert_just_below(slopes, [0.5, 1.0, 1.5], "float32")


def test_a_threshold_that_follows_feeds_a_monitor():
    import gradclip
    from gradclip.integrations.optax import adaptive_clip_by_global_norm

    transform, monitor = adaptive_clip_by_global_norm(skip_above=4.0), gradclip.Monitor()
    state = transform.init(jnp.zeros(2))
    for factor in (1.0, 3.0, 100.0):
        _, state = transform.update(factor * jnp.array([3.0, 4.0]), state)
        monitor.record(state.norm, state.max_norm, skip_above=4.0)
    assert (monitor.num_clipped, monitor.num_skipped) == (state.num_clipped, state.num_skipped) == (1, 1)


def test_the_state_with_the_norm_feeds_a_monitor():
    import gradclip
    from gradclip.integrations.optax import clip_by_global_norm_with_state

    transform = optax.chain(clip_by_global_norm_with_state(2.0), optax.sgd(1.0))
    params = {"w": jnp.zeros(2)}
    state, monitor = transform.init(params), gradclip.Monitor()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grad in ([3.0, 4.0], [0.6, 0.8]):
        params, state = step(params, state, {"w": jnp.array(grad)})
        monitor.record(*state[0])
    assert [(one.norm, one.max_norm) for one in monitor.records] == [(5.0, 2.0), (1.0, 2.0)]
    np.testing.assert_allclose(params["w"], [-1.8, -2.4], rtol=1e-6)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), one) for one in (state, transform.init(params))]
    assert shapes[0] == shapes[1]  # as lax.scan needs it


@both_ways
def test_integers_are_what_they_are_to_optax(call):
    """`clip` and `clip_by_block_rms` make floats of them; the global norm refuses them."""
    updates = {"w": jnp.array([3.0, 4.0]), "n": jnp.array([30, -40])}
    for ours, theirs in ((clip, optax.clip), (clip_by_block_rms, optax.clip_by_block_rms)):
        found, expected = call(ours, updates, 2.0), apply(theirs(2.0), updates)
        assert found["n"].dtype == expected["n"].dtype == jnp.float32
        np.testing.assert_allclose(found["n"], expected["n"], rtol=1e-6)
    for transformation in (clip_by_global_norm, optax.clip_by_global_norm):
        with pytest.raises(TypeError, match=r"\['n'\] has dtype int32|the same dtypes"):
            call(transformation, updates, 2.0)


@both_ways
def test_derivatives_of_integers_stay(call):
    updates = {"w": jnp.array([3.0, 4.0]), "n": np.zeros(3, jax.dtypes.float0)}
    for transformation in (clip_by_global_norm, clip, clip_by_block_rms):
        found = call(transformation, updates, 1.0)
        assert (found["n"].dtype, found["n"].shape) == (jax.dtypes.float0, (3,))
        assert found["w"].tolist() == call(transformation, {"w": updates["w"]}, 1.0)["w"].tolist()
