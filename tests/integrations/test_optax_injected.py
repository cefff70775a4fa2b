"""Our transformations inside those of optax that call, wrap or divide them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip
from gradclip.integrations import optax as ours

PARAMS = {"a": jnp.ones((3, 2)), "b": jnp.full(4, 2.0)}
GRADS = [jax.tree.map(lambda x, k=k: x * k, PARAMS) for k in (3.0, 1.0, 40.0)]
MADE = {
    "global": (ours.clip_by_global_norm, {"max_norm": 1.0}),
    "state": (ours.clip_by_global_norm_with_state, {"max_norm": 1.0}),
    "value": (ours.clip, {"max_delta": 0.5}),
    "agc": (ours.adaptive_grad_clip, {"clipping": 0.1, "eps": 1e-2}),
    "rms": (ours.clip_by_block_rms, {"threshold": 0.1}),
    "adaptive": (ours.adaptive_clip_by_global_norm, {}),
    "adaptive, 3": (ours.adaptive_clip_by_global_norm, {"skip_above": 3.0, "nonfinite": "drop", "ord": "inf"}),
    "rule": (ours.adaptive_clip_by_global_norm, {"rule": gradclip.QuantileRule(factor=0.5)}),
    "spikes": (ours.skip_spikes, {"tx": optax.adam(1e-1)}),
    "spikes, 2": (ours.skip_spikes, {"tx": optax.sgd(1e-1), "skip_above": 2}),
}


def updates(transform, jitted):
    state = transform.init(PARAMS)
    update = jax.jit(transform.update) if jitted else transform.update
    made = []
    for grads in GRADS:
        one, state = update(grads, state, PARAMS)
        made.append(one)
    return made


def assert_same(made, expected):
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_wrapped(name, jitted):
    make, settings = MADE[name]
    expected = updates(make(**settings), False)
    assert_same(updates(optax.inject_hyperparams(make)(**settings), jitted), expected)
    assert_same(updates(optax.MultiSteps(make(**settings), 1).gradient_transformation(), jitted), expected)
    everything = jax.tree.map(lambda _: True, PARAMS)
    assert_same(updates(optax.masked(make(**settings), everything), jitted), expected)
    assert_same(
        updates(optax.partition({"x": make(**settings)}, jax.tree.map(lambda _: "x", PARAMS)), jitted), expected
    )


def test_parts_of_a_tree_have_norms_of_their_own():
    masked = optax.masked(ours.clip_by_global_norm(1.0), {"a": True, "b": False})
    made, _ = masked.update(GRADS[0], masked.init(PARAMS), PARAMS)
    assert float(gradclip.global_norm(made["a"])) == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_array_equal(made["b"], GRADS[0]["b"])


def test_orders_are_static_or_understood():
    make = optax.inject_hyperparams(ours.adaptive_clip_by_global_norm, static_args="ord")
    assert_same(updates(make(ord=1), True), updates(ours.adaptive_clip_by_global_norm(ord=1), False))
    traced = optax.inject_hyperparams(ours.adaptive_clip_by_global_norm)
    for ord in (1, 3.0, math.inf):
        expected = updates(ours.adaptive_clip_by_global_norm(ord=ord), False)
        assert_same(updates(traced(ord=ord), False), expected)
        with pytest.raises(TypeError, match=r"ord must be known while JAX traces.*static_args='ord'"):
            updates(traced(ord=ord), True)
    with pytest.raises(TypeError, match=r"axis must be known while JAX traces.*static_args='axis'"):
        updates(optax.inject_hyperparams(ours.adaptive_grad_clip)(clipping=0.1, axis=0), True)
    with pytest.raises(ValueError, match="ord must be a number >= 1"):
        traced(ord=0.5).init(PARAMS)


@pytest.mark.parametrize("settings", [{}, {"skip_above": math.inf}, {"rule": gradclip.SpreadRule()}])
def test_the_rule_does_not_depend_on_jit(settings):
    transform = optax.inject_hyperparams(ours.adaptive_clip_by_global_norm)(**settings)
    assert_same(updates(transform, True), updates(transform, False))


def test_scheduled_thresholds_are_used_and_shown():
    transform = optax.inject_hyperparams(ours.clip_by_global_norm_with_state)(max_norm=lambda count: 1.0 + count)
    state = transform.init(PARAMS)
    for i in range(3):
        made, state = jax.jit(transform.update)(GRADS[2], state, PARAMS)
        assert float(gradclip.global_norm(made)) == pytest.approx(1.0 + i, rel=1e-5)
        assert float(state.inner_state.max_norm) == 1.0 + i


def test_factors_may_be_scheduled():
    schedule = lambda count: jnp.where(count < 2, 100.0, 2.0)
    make = optax.inject_hyperparams(ours.skip_spikes)
    transform = make(optax.sgd(1.0), skip_above=schedule)
    state = transform.init(PARAMS)
    skipped = []
    for grads in (GRADS[0], GRADS[2], GRADS[2]):
        _, state = jax.jit(transform.update)(grads, state, PARAMS)
        skipped.append(int(state.inner_state.clip.num_skipped))
    assert skipped[:2] == [0, 0]
    with pytest.raises(ValueError, match="skip_above must be from 1"):
        make(optax.sgd(1.0), skip_above=0.5).init(PARAMS)
