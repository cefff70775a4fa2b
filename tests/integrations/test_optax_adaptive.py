"""Transformations of optax with a threshold that follows the norms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from orbax import checkpoint

from gradclip import QuantileRule, SpreadRule, SteadyRule
from gradclip.integrations.optax import adaptive_clip_by_global_norm, adaptive_clip_by_layer_norm, skip_spikes

NORMS = [5.0, 10.0, math.nan, 0.0, 500.0, 7.0, math.inf, 6.0, 0.1]
THRESHOLDS = [math.inf, 10.0, 10.0, 10.0, 10.0, 20.0, 14.0, 14.0, 14.0]
RULE = QuantileRule(window=4)
PARAMS = {"w": jnp.ones(2)}


def gradient(norm):
    return {"w": jnp.array([0.6, 0.8]) * norm}


def run(transform, norms):
    """Return norms after clipping, thresholds and the last state of a jitted transformation."""
    update, state = jax.jit(transform.update), transform.init(PARAMS)
    after, thresholds = [], []
    for norm in norms:
        updates, state = update(gradient(norm), state, PARAMS)
        after.append(float(jnp.linalg.norm(updates["w"])))
        thresholds.append(float(state.max_norm))
    return after, thresholds, state


def test_each_step_is_clipped_by_what_was_before():
    after, thresholds, state = run(adaptive_clip_by_global_norm(RULE, nonfinite="drop"), NORMS)
    np.testing.assert_allclose(after, [5.0, 10.0, 0.0, 0.0, 10.0, 7.0, 0.0, 6.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(thresholds, THRESHOLDS, rtol=1e-6)
    assert (int(state.num_clipped), int(state.num_skipped)) == (1, 2)
    np.testing.assert_allclose(state.norm, 0.1, rtol=1e-6)


def test_nan_is_seen_unless_it_is_skipped_and_kills_nothing():
    after, thresholds, _ = run(adaptive_clip_by_global_norm(RULE), NORMS)
    assert np.isnan(after).tolist() == [not math.isfinite(norm) for norm in NORMS]
    np.testing.assert_allclose(thresholds, THRESHOLDS, rtol=1e-6)


def test_spikes_may_become_zeros():
    after, _, state = run(adaptive_clip_by_global_norm(RULE, skip_above=10.0), [1.0, 1.0, 19.0, 21.0, 1.0])
    np.testing.assert_allclose(after, [1.0, 1.0, 2.0, 0.0, 1.0], rtol=1e-6)
    assert (int(state.num_clipped), int(state.num_skipped)) == (1, 1)


def test_a_spike_beside_what_counts_as_zero_is_one():
    transform = adaptive_clip_by_global_norm(RULE, nonfinite="zero", skip_above=10.0)
    state = transform.init(jnp.zeros(3))
    for norm in (1.0, 1000.0):
        updates, state = transform.update(jnp.array([math.nan, 0.6 * norm, 0.8 * norm]), state)
    assert updates.tolist() == [0.0, 0.0, 0.0]
    assert (int(state.num_clipped), int(state.num_skipped)) == (0, 1)


def test_sparse_updates_of_a_spike_become_zeros():
    transform = adaptive_clip_by_global_norm(RULE, skip_above=10.0)
    state = transform.init(jnp.zeros(3))
    for norm in (1.0, 1000.0):
        updates, state = transform.update(BCOO.fromdense(jnp.array([0.0, norm, 0.0])), state)
    assert updates.indices.tolist() == [[1]]
    assert updates.data.tolist() == [0.0]


def test_it_chains_scans_and_trains():
    optimizer = optax.chain(adaptive_clip_by_global_norm(), optax.adamw(1e-3))

    def step(carry, norm):
        params, state = carry
        updates, state = optimizer.update(gradient(norm), state, params)
        return (optax.apply_updates(params, updates), state), state[0].norm

    (params, state), norms = jax.lax.scan(step, (PARAMS, optimizer.init(PARAMS)), jnp.array([1.0, 2.0, 100.0]))
    np.testing.assert_allclose(norms, [1.0, 2.0, 100.0], rtol=1e-6)
    assert int(state[0].num_clipped) == 2
    assert params["w"][0] < 1.0


def test_wide_parameters_have_a_wide_history():
    with jax.enable_x64(True):
        transform = adaptive_clip_by_global_norm()
        params = jnp.ones(2, jnp.float64)
        state = transform.update(params * 1e200, transform.init(params))[1]
        assert state.history.norms.dtype == state.norm.dtype == jnp.float64
        assert float(state.norm) == pytest.approx(1e200 * math.sqrt(2))


@pytest.mark.parametrize("make", [lambda: optax.adamw(0.1), lambda: optax.sgd(0.1, momentum=0.9)])
def test_a_skipped_step_leaves_everything_as_it_was(make):
    skipping, plain = skip_spikes(make(), RULE, skip_above=10.0), make()
    update = jax.jit(skipping.update)
    state, expected = skipping.init(PARAMS), plain.init(PARAMS)
    for norm in (1.0, 1.0, 1000.0, math.nan, 1.0, math.inf, 1.5):
        updates, state = update(gradient(norm), state, PARAMS)
        if norm < 1000.0:
            wanted, expected = plain.update(gradient(norm), expected, PARAMS)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), updates, wanted)
        else:
            assert not np.any(updates["w"])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state.inner, expected)
    assert (int(state.clip.num_skipped), int(state.clip.num_clipped)) == (3, 0)


def test_what_is_not_skipped_is_clipped():
    optimizer = skip_spikes(optax.sgd(1.0), RULE, skip_above=10.0)
    state = optimizer.init(PARAMS)
    for norm in (1.0, 19.0):
        updates, state = optimizer.update(gradient(norm), state)
    np.testing.assert_allclose(updates["w"], [-1.2, -1.6], rtol=1e-6)


def test_a_level_that_lasts_is_accepted():
    optimizer = skip_spikes(optax.sgd(1.0), RULE)
    state, taken = optimizer.init(PARAMS), []
    for norm in [1.0] * 4 + [1000.0] * 6:
        updates, state = optimizer.update(gradient(norm), state)
        taken.append(bool(np.any(updates["w"])))
    assert taken == [True] * 4 + [False] * RULE.recovery_steps + [True] * (6 - RULE.recovery_steps)


def test_the_optimizer_gets_what_else_is_passed():
    seen = []
    inner = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda updates, state, params=None, *, value: (seen.append(value), (updates, state))[1]
    )
    optimizer = skip_spikes(inner)
    optimizer.update(gradient(1.0), optimizer.init(PARAMS), PARAMS, value=3.0)
    assert seen[-1] == 3.0


@pytest.mark.parametrize("make", [adaptive_clip_by_global_norm, lambda **s: skip_spikes(optax.sgd(1.0), **s)])
def test_settings_are_checked(make):
    with pytest.raises(ValueError, match=r"skip_above must be from 1\.0 to inf"):
        make(skip_above=0.5)
    with pytest.raises(ValueError, match="ord must be a number"):
        make(ord=0)


@pytest.mark.parametrize("transform", [adaptive_clip_by_global_norm(), skip_spikes(optax.adamw(0.1))])
def test_the_first_state_can_be_donated(transform):
    state = transform.init(PARAMS)
    _, state = jax.jit(transform.update, donate_argnums=1)(gradient(1.0), state, PARAMS)
    _, state = jax.jit(transform.update, donate_argnums=1)(gradient(2.0), state, PARAMS)
    jax.block_until_ready(state)


def test_an_optimizer_may_widen_its_state_at_the_first_step():
    params, inner = {"w": jnp.zeros(2, jnp.float16)}, optax.sgd(1.0, momentum=0.5)
    optimizer = skip_spikes(inner, RULE)
    state, plain = optimizer.init(params), inner.init(params)
    for norm in (1.0, 1.0):
        updates, state = optimizer.update(gradient(norm), state, params)
        expected, plain = inner.update(gradient(norm), plain, params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert state.inner[0].trace["w"].dtype == plain[0].trace["w"].dtype == jnp.float32
    _, skipped = optimizer.update(gradient(1000.0), state, params)
    np.testing.assert_array_equal(skipped.inner[0].trace["w"], state.inner[0].trace["w"])


def test_outside_of_jit_nothing_is_compiled_for_a_step():
    seen = []

    def look(updates, state, params=None):
        seen.append(float(updates["w"][0]))  # which a traced array would refuse
        return updates, state

    optimizer = skip_spikes(optax.GradientTransformation(lambda params: (), look), RULE)
    state = optimizer.init(PARAMS)
    for norm in (1.0, 2.0):
        _, state = optimizer.update(gradient(norm), state, PARAMS)
    assert seen == pytest.approx([0.6, 1.2])


def test_what_is_no_optimizer_is_told_before_the_first_step():
    with pytest.raises(TypeError, match=r"tx must be an optimizer of optax, got 4.0 of type float\."):
        skip_spikes(4.0)


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
@pytest.mark.parametrize("compiled", [jax.jit, lambda update: update], ids=["jit", "eager"])
def test_finite_spikes_with_a_norm_beyond_float32_are_skipped(policy, compiled):
    transform = adaptive_clip_by_global_norm(skip_above=3.0, nonfinite=policy)
    state = transform.init(jnp.zeros(200))
    for value, left, counts in ((1.0, 200**0.5, (0, 0)), (3e37, 0.0, (0, 1)), (2.5, 2 * 200**0.5, (1, 1))):
        updates, state = compiled(transform.update)({"empty": jnp.zeros(0), "w": jnp.full(200, value)}, state)
        assert float(jnp.linalg.norm(updates["w"])) == pytest.approx(left, rel=1e-5)
        assert (int(state.num_clipped), int(state.num_skipped)) == counts
    updates, state = transform.update({"empty": jnp.zeros(0), "w": jnp.full(200, jnp.inf)}, state)
    assert bool(jnp.isnan(updates["w"]).all()) == (policy == "propagate")
    assert int(state.num_skipped) == 1 + (policy == "drop")


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
@pytest.mark.parametrize("compiled", [jax.jit, lambda update: update], ids=["jit", "eager"])
def test_a_clipped_step_with_a_norm_beyond_float32_counts(policy, compiled):
    transform = adaptive_clip_by_global_norm(RULE, nonfinite=policy)
    state = transform.init(jnp.zeros(200))
    for value, counts in ((1.0, (0, 0)), (3e37, (1, 0)), (jnp.inf, (1, int(policy == "drop")))):
        tree = {"last": jnp.full(200, value), "first": jnp.ones(3, jnp.bfloat16)}
        updates, state = compiled(transform.update)(tree, state)
        assert (int(state.num_clipped), int(state.num_skipped)) == counts
        if value == 3e37:
            assert float(jnp.linalg.norm(updates["last"])) == pytest.approx(float(state.max_norm), rel=1e-5)


# A threshold for each leaf


@pytest.mark.parametrize("rule", [RULE, SpreadRule(window=5), SteadyRule(window=6)])
@pytest.mark.parametrize("nonfinite", ["drop", "propagate"])
def test_each_leaf_is_clipped_to_the_bit_as_by_a_transformation_of_its_own(rule, nonfinite):
    rng, shapes = np.random.default_rng(0), {"a": (3,), "b": [(), (2, 2)]}
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    leaves, structure = jax.tree.flatten(params)
    many, one = (
        adaptive_clip_by_layer_norm(rule, nonfinite=nonfinite),
        adaptive_clip_by_global_norm(rule, nonfinite=nonfinite),
    )
    update, alone = jax.jit(many.update), jax.jit(one.update)
    state, states = many.init(params), [one.init(leaf) for leaf in leaves]
    for step in range(15):
        grads = [jnp.asarray(rng.normal(size=x.shape) * rng.exponential(), jnp.float32) for x in leaves]
        grads[0] = grads[0] * {4: 0.0, 6: math.nan, 9: 1e3}.get(step, 1.0)
        updates, state = update(jax.tree.unflatten(structure, grads), state)
        for place, grad in enumerate(grads):
            expected, states[place] = alone(grad, states[place])
            np.testing.assert_array_equal(jax.tree.leaves(updates)[place], expected)
            found = [state.norms[place], state.max_norms[place], state.num_clipped[place]]
            np.testing.assert_array_equal(
                found, [states[place].norm, states[place].max_norm, states[place].num_clipped]
            )
    assert int(state.num_clipped.min()) > 0


def test_leaves_that_do_not_count_keep_their_thresholds_and_other_leaves_are_refused():
    transform = optax.chain(adaptive_clip_by_layer_norm(where="w"), optax.sgd(1.0))
    params = {"b": jnp.zeros(1), "n": jnp.zeros(1, int), "w": jnp.zeros(2)}
    state = transform.init(params)
    for size in (1.0, 10.0):
        grads = {"b": jnp.array([size]), "n": jnp.zeros(1, int), "w": jnp.array([0.6, 0.8]) * size}
        updates, state = transform.update(grads, state)
    np.testing.assert_allclose(updates["b"], [-10.0])
    np.testing.assert_allclose(updates["w"], [-0.6, -0.8], rtol=1e-6)
    assert state[0].history.count.tolist() == [0, 0, 2]
    assert adaptive_clip_by_layer_norm().update({}, adaptive_clip_by_layer_norm().init({}))[0] == {}
    other = grads | {"v": grads["b"]}
    del other["b"]
    for updates, words in (
        ({"w": jnp.zeros(2)}, r"1 leaves, w, but the state has histories of 3 leaves. Call init"),
        (other, r"3 leaves, n, v, w, but the state has histories of b, n, w. Call init with"),
    ):
        for update in (transform.update, jax.jit(transform.update)):
            with pytest.raises(ValueError, match=words):
                update(updates, state)


@pytest.mark.parametrize("make", [adaptive_clip_by_global_norm, adaptive_clip_by_layer_norm])
def test_orbax_restores_a_state(make, tmp_path):
    transform, tree = make(SpreadRule(window=4)), {"w": jnp.ones(3), "b": jnp.ones(2)}
    state = transform.init(tree)
    for norm in (1.0, 2.0, 9.0):
        _, state = transform.update({"w": tree["w"] * norm, "b": tree["b"]}, state)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(mine, theirs)
