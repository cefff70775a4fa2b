"""The threshold that stays where it is: its formula, where it moves, and the theorem that it recovers."""

import io
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from gradclip import AdaptiveThreshold, QuantileRule, SteadyRule
from norms_in_turn import STEADY_RULES, awkward_norms, clamped, fed, on_a_level


def by_the_formula(rule, norms):
    """Return the threshold after each finite positive norm, as the docstring has it, in exact arithmetic."""
    factor, held, found = Fraction(rule.factor), Fraction(0), []
    for count in range(1, len(norms) + 1):
        last = sorted(map(Fraction, norms[max(0, count - rule.window) : count]))
        level = factor * last[max(1, math.ceil(Fraction(repr(rule.quantile)) * len(last))) - 1]
        held = min(max(held or level, level / 8), 4 * level)
        found.append(float(min(max(held, Fraction(rule.lower)), Fraction(min(rule.upper, 1e300)))))
    return found


@pytest.mark.parametrize("rule", STEADY_RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
@pytest.mark.parametrize("shape", [(), (1,)], ids=["number", "array"])
@pytest.mark.parametrize("like", [np.zeros((), np.float32), np.zeros(())], ids=["float32", "float64"])
def test_it_is_the_formula(rule, shape, like):
    rng, history, seen, found = np.random.default_rng(5), rule.init(like, shape), [], []
    levels = np.repeat(np.exp(rng.uniform(-6, 6, 10)), 2 * min(rule.window, 10))
    for norm in (levels * rng.exponential(size=len(levels))).astype(np.float32).tolist():
        history = rule.observe(history, norm if shape == () else np.full(shape, norm))
        seen.append(norm)
        found.append(np.ravel(rule.max_norm(history))[0])
    assert found[-1].dtype == like.dtype
    np.testing.assert_allclose(found, by_the_formula(rule, seen), rtol=float(8 * np.finfo(like.dtype).eps))


def test_it_stays_to_the_last_bit_while_it_fits():
    """Norms vary tenfold and their level falls to a quarter: every step is clipped to an eighth of the first norm."""
    rng, max_norm, thresholds = np.random.default_rng(0), AdaptiveThreshold(SteadyRule()), []
    for step in range(500):
        size = 4.0 if step == 0 else (3.0 - step / 250) * rng.uniform(1.0, 10.0)
        gradclip.clip_grad_norm_({"w": np.float32([size, 0.0])}, max_norm)
        thresholds.append(max_norm.max_norm)
    assert thresholds[0] == np.float32(0.01)
    assert set(thresholds[1:]) == {0.5}
    assert max_norm.num_clipped == 500


@pytest.mark.parametrize(("level", "found"), [(0.5, 0.25), (2.0, 1.0), (64.0, 1.0), (640.0, 10.0)])
def test_it_moves_to_the_nearer_end_of_what_fits(level, found):
    rule = SteadyRule()
    assert rule.max_norm(fed(rule, rule.init(), [8.0] + [level] * 128)) == found


@pytest.mark.parametrize("rule", STEADY_RULES, ids=lambda rule: f"{rule.quantile}-{rule.window}")
def test_after_k_norms_on_a_level_the_threshold_is_that_levels(rule):
    low, high, history = on_a_level(rule)
    threshold, rounding = rule.max_norm(history), 1 + 1e-6
    assert (clamped(rule, low / 8) <= threshold * rounding).all()
    assert (threshold <= clamped(rule, 4 * high) * rounding).all()


def test_the_defaults_recover_within_65_steps_and_not_sooner():
    rule = SteadyRule()
    assert rule.recovery_steps == 65
    for wrong, found in ((1e-6, 1 / 64), (1e6, 1 / 2)):
        histories = [fed(rule, rule.init(), [wrong] * 128 + [1.0] * steps) for steps in (64, 65)]
        assert rule.max_norm(histories[1]) == found
        assert (rule.max_norm(histories[0]) == found) == (wrong > 1)  # at 64, the lower of two middles


@pytest.mark.parametrize("first", [[math.nan], [math.inf, 0.0], [1e6], [1e-6], [-1.0, math.nan, 1e8]])
def test_a_bad_start_is_forgotten(first):
    rule = SteadyRule()
    threshold = rule.max_norm(fed(rule, rule.init(), [*first, 1.0, 1.2, 0.9, 1.1]))
    assert 0.9 / 64 <= threshold <= 1.2 / 2


def test_the_first_step_is_short_and_finite():
    rule = SteadyRule()
    assert rule.max_norm(rule.init()) == np.float32(0.01)
    assert rule.max_norm(fed(rule, rule.init(), [math.nan, math.inf, 0.0])) == np.float32(0.01)
    assert SteadyRule(initial=math.inf, upper=2.0).max_norm(rule.init()) == 2.0


@pytest.mark.parametrize("like", [np.float32(0), torch.zeros(()), jnp.zeros(()), tf.zeros(())])
def test_every_framework_has_the_same_bits(like):
    for rule in STEADY_RULES[1:3]:
        alone, there, layers = rule.init(), rule.init(like), rule.init(like, (2,))
        for norm in awkward_norms()[:30]:
            alone = rule.observe(alone, norm)
            there, layers = rule.observe(there, norm), rule.observe(layers, [norm, norm])
            expected = rule.max_norm(alone)
            assert expected.dtype == np.float32
            assert np.asarray(rule.max_norm(there)) == expected
            assert (np.asarray(rule.max_norm(layers)) == expected).all()
        assert int(alone.count) == int(there.count) > 0


def test_thresholds_of_the_norms_kept_are_normal():
    rule = SteadyRule(factor=2.0**20)
    for edge in (2.0**-126, 2.0**-122, 2.0**-119, 2.0**100, 2.0**103, 2.0**104, 2.0**127):
        history = rule.observe(rule.init(), edge)
        if int(history.count):
            after = rule.observe(rule.init()._replace(held=np.float32(1e-30)), edge)
            assert 2.0**-126 <= float(after.held) < math.inf
            assert 2.0**-126 <= float(history.held) < math.inf


# Holders


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_resumed_run_goes_on_to_the_bit(cut):
    norms = np.float32([9.0, *np.random.default_rng(2).exponential(size=39)])
    rule = SteadyRule(window=8)

    def run(max_norm, norms):
        for norm in norms:
            gradclip.clip_grad_norm_({"w": np.float32([norm, 0.0])}, max_norm)

    whole, first, second = AdaptiveThreshold(rule), AdaptiveThreshold(rule), AdaptiveThreshold(rule)
    run(whole, norms)
    run(first, norms[:cut])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.state_dict() == first.state_dict()
    assert second.next_max_norm == first.next_max_norm
    run(second, norms[cut:])
    assert second.state_dict() == whole.state_dict()


def test_states_of_other_rules_are_taken():
    other, steady = AdaptiveThreshold(), AdaptiveThreshold(SteadyRule())
    for norm in (8.0, 5.0):
        gradclip.clip_grad_norm_({"w": np.float32([norm, 0.0])}, other)
    steady.load_state_dict(other.state_dict())
    assert steady.next_max_norm == 1.0
    other.load_state_dict(steady.state_dict())
    assert other.next_max_norm == AdaptiveThreshold().rule.max_norm(other.history)


def test_it_moves_to_the_framework_and_dtype_of_the_gradients():
    max_norm = AdaptiveThreshold(SteadyRule())
    for update in (np.float32([8.0]), jnp.float32([8.0]), torch.tensor([8.0]), np.float64([8.0])):
        gradclip.clip_grad_norm_({"w": update} if isinstance(update, np.ndarray) else [held(update)], max_norm)
    assert max_norm.history.held.dtype == max_norm.history.norms.dtype == np.float64
    assert (max_norm.next_max_norm, max_norm.steps, max_norm.num_clipped) == (1.0, 4, 4)


def held(grad):
    return type("Holder", (), {"grad": grad})()


def test_optax_and_compiled_code_take_it():
    import jax
    import optax

    from gradclip.integrations.optax import adaptive_clip_by_global_norm

    rule = SteadyRule()
    optimizer = optax.chain(adaptive_clip_by_global_norm(rule), optax.sgd(1.0))
    state = optimizer.init(jnp.zeros(2))
    update = jax.jit(optimizer.update, donate_argnums=1)
    for gradient in ([3.0, 4.0], [30.0, 40.0], [6.0, 8.0]):
        updates, state = update(jnp.array(gradient), state)
    np.testing.assert_allclose(updates, [-0.375, -0.5], rtol=1e-6)
    _, thresholds = jax.lax.scan(
        lambda history, norm: (rule.observe(history, norm), rule.max_norm(history)),
        rule.init(jnp.zeros(())),
        jnp.array([8.0, 5.0, math.nan, 4.0]),
    )
    assert thresholds.tolist() == [np.float32(0.01), 1.0, 1.0, 1.0]


# What is refused


def test_histories_of_other_rules_are_refused():
    steady, other = SteadyRule(), QuantileRule()
    for rule, history, count in ((steady, other.init(), 2), (other, steady.init(), 3)):
        for call in (rule.max_norm, lambda history, rule=rule: rule.observe(history, 1.0)):
            with pytest.raises(ValueError, match=rf"the history has {count} arrays, .* from its own init"):
                call(history)


def test_skipping_above_it_is_an_error():
    with pytest.raises(ValueError, match=r"a SteadyRule may be far below it. Pass rule=gradclip.Quant"):
        AdaptiveThreshold(SteadyRule(), skip_above=4.0)
