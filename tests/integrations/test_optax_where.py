"""Which updates count, thresholds by a schedule, and states in variables of Flax's nnx."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradclip
from gradclip.integrations import optax as ours

FROZEN = jnp.array([1e6, math.nan])


def tree(x, y):
    return {"lora": {"a": jnp.array([x]), "b": jnp.array([y])}, "frozen": FROZEN}


def after(transform, grads, jitted):
    """Return the updates after the last of some gradients, and the state."""
    state = transform.init(tree(0.0, 0.0))
    update = jax.jit(transform.update) if jitted else transform.update
    for one in grads:
        updates, state = update(one, state, tree(0.0, 0.0))
    return updates, state


def lora(updates):
    return [float(updates["lora"][name][0]) for name in "ab"]


both_ways = pytest.mark.parametrize("jitted", [False, True])
NAMED = pytest.mark.parametrize(
    "where", ["lora.*", ["lora.a", "lora.b"], lambda name: name.startswith("lora")], ids=["pattern", "list", "function"]
)


@both_ways
@NAMED
@pytest.mark.parametrize("make", [ours.clip_by_global_norm, ours.clip_by_global_norm_with_state])
def test_frozen_parameters_are_out_of_the_norm(jitted, where, make):
    updates, state = after(make(1.0, where=where), [tree(3.0, 4.0)], jitted)
    assert lora(updates) == pytest.approx([0.6, 0.8], rel=1e-5)
    np.testing.assert_array_equal(updates["frozen"], FROZEN)
    if make is ours.clip_by_global_norm_with_state:
        assert float(state.norm) == pytest.approx(5.0)


@both_ways
@NAMED
def test_adaptive_thresholds_follow_what_counts(jitted, where):
    adaptive = ours.adaptive_clip_by_global_norm(gradclip.QuantileRule(), skip_above=4.0, where=where)
    steps = [tree(3.0, 4.0)] * 5
    updates, state = after(adaptive, [*steps, tree(6.0, 8.0)], jitted)
    assert (float(state.norm), float(state.max_norm)) == (10.0, pytest.approx(10.0))
    updates, state = after(adaptive, [*steps, tree(300.0, 400.0)], jitted)
    assert (lora(updates), int(state.num_skipped)) == ([0.0, 0.0], 1)
    np.testing.assert_array_equal(updates["frozen"], FROZEN)


@both_ways
def test_a_norm_beyond_float32_beside_a_frozen_nan(jitted):
    adaptive = ours.adaptive_clip_by_global_norm(nonfinite="drop", where="lora.*")
    updates, state = after(adaptive, [tree(3.0, 4.0)] * 3 + [tree(3e38, 3e38)], jitted)
    assert (float(state.norm), int(state.num_clipped), int(state.num_skipped)) == (math.inf, 1, 0)
    assert math.hypot(*lora(updates)) == pytest.approx(5.0, rel=1e-4)


@both_ways
def test_spikes_of_what_counts_are_skipped(jitted):
    optimizer = ours.skip_spikes(optax.sgd(1.0), where="lora.*")
    updates, state = after(optimizer, [tree(3.0, 4.0)] * 2, jitted)
    assert lora(updates) == pytest.approx([-3.0, -4.0])
    np.testing.assert_array_equal(updates["frozen"], -FROZEN)
    updates, state = after(optimizer, [tree(3.0, 4.0), tree(300.0, 400.0)], jitted)
    assert (int(state.clip.num_skipped), float(jnp.abs(updates["frozen"]).max())) == (1, 0.0)


def test_a_name_that_is_not_there():
    with pytest.raises(ValueError, match="where chooses none of the names"):
        after(ours.clip_by_global_norm(1.0, where="head.*"), [tree(3.0, 4.0)], False)


@both_ways
def test_a_schedule_is_the_threshold(jitted):
    transform = optax.chain(ours.clip_by_global_norm_with_state(lambda count: 2.0 / (count + 1), where="lora.*"))
    for steps in (1, 2, 4):
        updates, state = after(transform, [tree(3.0, 4.0)] * steps, jitted)
        assert lora(updates) == pytest.approx([1.2 / steps, 1.6 / steps], rel=1e-5)
        assert float(state[0].inner_state.norm) == pytest.approx(5.0)
        assert float(state[0].hyperparams["max_norm"]) == pytest.approx(2.0 / steps)
    scheduled = ours.clip_by_global_norm(optax.linear_schedule(1.0, 0.0, 10))
    state = scheduled.init(jnp.zeros(2))
    for threshold in (1.0, 0.9):
        updates, state = scheduled.update(jnp.array([3.0, 4.0]), state)
        assert float(jnp.linalg.norm(updates)) == pytest.approx(threshold, rel=1e-4)


def test_a_monitor_takes_states_of_nnx():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    chain = optax.chain(ours.adaptive_clip_by_global_norm(), optax.sgd(0.1))
    optimizer, monitor = nnx.Optimizer(model, chain, wrt=nnx.Param), gradclip.Monitor()
    seen = []
    for scale in (1.0, 2.0, 3.0):
        grads = nnx.grad(lambda m, scale=scale: scale * m(jnp.ones((1, 2))).sum())(model)
        optimizer.update(model, grads)
        monitor.record(optimizer.opt_state[0])
        seen.append((float(optimizer.opt_state[0].norm[...]), float(optimizer.opt_state[0].max_norm[...])))
    assert [(step.norm, step.max_norm) for step in monitor.records] == seen
    assert [norm for norm, _ in seen] == pytest.approx([scale * math.sqrt(3.0) for scale in (1.0, 2.0, 3.0)])
