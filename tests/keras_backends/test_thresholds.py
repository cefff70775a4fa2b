"""Thresholds that follow the norms, and schedules: each step has the threshold that the rule gives on the host."""

import copy
import math
import pickle

import keras
import numpy as np
import pytest
from keras import ops

from gradclip import AdaptiveThreshold, PrivateQuantile, QuantileRule, SpreadRule, SteadyRule
from gradclip.integrations.keras import ClippingMetrics, clipped
from keras_backends.known_gradients import SGD, arrays, linear_model, train, updates, weights

NORMS = [5.0, 10.0, math.nan, 0.0, 500.0, 7.0, math.inf, 6.0, 0.1, 3.3, 4.7]
RULES = [QuantileRule(1.0, 0.9, window=4), SpreadRule(window=4), SteadyRule(window=4)]
# What compiles PyTorch's steps takes long: test_torch.py has one.
WAYS = [{}, {"jit_compile": keras.config.backend() != "torch"}, {"run_eagerly": True}]
DECAY = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [8.0, 4.0, 0.5])


class Recorder(keras.callbacks.Callback):
    """The norm and the threshold of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        self.seen.append((float(optimizer.last_norm), float(optimizer.last_max_norm)))


def rows(norms):
    return [[0.6 * norm, 0.8 * norm] for norm in norms]


def recorded(model, norms, **settings):
    recorder = Recorder()
    train(model, rows(norms), callbacks=[recorder], **settings)
    return recorder.seen


def on_host(rule, norms):
    """Return the threshold of each step by the rule in NumPy."""
    history, found = rule.init(), []
    for norm in norms:
        found.append(float(rule.max_norm(history)))
        history = rule.observe(history, np.float32(norm))
    return found


def finite(norms):
    return [norm if math.isfinite(norm) else 1.0 for norm in norms]


@pytest.mark.parametrize(
    ("rule", "settings"), [*zip(RULES, WAYS, strict=True), *zip(RULES, [WAYS[1], WAYS[2], WAYS[0]], strict=True)]
)
def test_thresholds_of_each_step_are_those_of_the_host(rule, settings):
    model = linear_model(SGD(learning_rate=1.0, max_norm=rule, nonfinite="drop"), **settings)
    norms, thresholds = zip(*recorded(model, NORMS), strict=True)
    assert norms == pytest.approx(NORMS, nan_ok=True)
    assert list(thresholds) == on_host(rule, norms)
    steps = [min(norm, limit) for norm, limit in zip(norms, thresholds, strict=True) if math.isfinite(norm)]
    assert np.linalg.norm(weights(model)) == pytest.approx(sum(steps), rel=1e-5)


def test_the_quantile_is_that_of_the_norms_before():
    norms, thresholds = zip(*recorded(linear_model(SGD(1.0, max_norm=RULES[0])), finite(NORMS)), strict=True)
    kept = [[norm for norm in norms[:step] if norm > 0][-4:] for step in range(1, len(norms))]
    expected = [np.quantile(np.float32(before), 0.9, method="inverted_cdf") for before in kept]
    assert list(thresholds) == [math.inf, *map(float, expected)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_variables_have_thresholds_of_their_own(rule):
    optimizer = SGD(1.0, max_norm=rule, scope="variable")
    variables = [keras.Variable(np.zeros((1, 2), np.float32)), keras.Variable(np.zeros(1, np.float32))]
    seen = []
    for norm, other in zip(NORMS, NORMS[::-1], strict=True):
        before = [variable.numpy() for variable in variables]
        optimizer.apply([ops.array([[0.0, norm]], "float32"), ops.array([-other], "float32")], variables)
        seen.append(ops.convert_to_numpy(optimizer.last_max_norm).tolist())
        for variable, old, limit in zip(variables, before, seen[-1], strict=True):
            assert not np.abs(variable.numpy() - old).max() > limit * 1.001
        # One that is NaN tells no other.
        for variable in variables:
            variable.assign(ops.zeros(variable.shape))
    assert seen == [list(both) for both in zip(on_host(rule, NORMS), on_host(rule, NORMS[::-1]), strict=True)]


def test_each_variable_must_have_a_gradient_for_a_threshold_of_its_own():
    optimizer = SGD(1.0, max_norm=SpreadRule(), scope="variable")
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    optimizer.build(variables)
    for given in (variables[:1], variables[::-1]):
        with pytest.raises(ValueError, match=r"a gradient for each of the 2 variables .*, got \d"):
            optimizer.apply([ops.array([1.0])] * len(given), given)
    with pytest.warns(UserWarning, match="Gradients do not exist"), pytest.raises(ValueError, match="got 1"):
        optimizer.apply([ops.array([1.0]), None], variables)


@pytest.mark.parametrize(
    ("rule", "through"),
    [(RULES[0], "pickle"), (RULES[1], "weights"), (RULES[2], "file"), (DECAY, "file"), (RULES[1], "optimizer")],
)
def test_a_run_goes_on_after_loading_bit_for_bit(rule, through, tmp_path):
    def made():
        return linear_model(clipped(keras.optimizers.Adam)(0.1, max_norm=rule))

    whole, first = made(), made()
    expected = recorded(whole, NORMS[7:] + NORMS[:2]) + recorded(whole, NORMS[7:])
    seen = recorded(first, NORMS[7:] + NORMS[:2])
    if through == "file":
        first.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
    elif through == "pickle":
        again = pickle.loads(pickle.dumps(first))
    elif through == "optimizer":
        again = linear_model(pickle.loads(pickle.dumps(copy.deepcopy(first.optimizer))))
        again.set_weights(first.get_weights())
        assert int(again.optimizer.iterations) == len(seen)
    else:
        first.save_weights(tmp_path / "model.weights.h5")
        again = made()
        again.optimizer.build(again.trainable_variables)
        again.load_weights(tmp_path / "model.weights.h5")
    assert again.optimizer.get_config() | {"name": ""} == first.optimizer.get_config() | {"name": ""}
    assert seen + recorded(again, NORMS[7:]) == expected
    assert weights(again).tolist() == weights(whole).tolist()


@pytest.mark.parametrize("skip_above", [math.inf, 3.0])
@pytest.mark.parametrize("rule", [*RULES, DECAY], ids=lambda rule: type(rule).__name__)
def test_configurations_say_which_rule(rule, skip_above):
    skips = isinstance(rule, QuantileRule) or skip_above == math.inf
    given = AdaptiveThreshold(rule, skip_above=skip_above) if rule is not DECAY and skips else rule
    config = keras.optimizers.serialize(SGD(max_norm=given))
    again = keras.optimizers.get(config)
    assert keras.optimizers.serialize(again) == config
    kept = again.max_norm
    assert getattr(kept, "skip_above", None) == getattr(given, "skip_above", None)
    assert type(kept) is type(given)
    assert rule is DECAY or (kept.rule if isinstance(kept, AdaptiveThreshold) else kept) == rule


def test_accumulated_gradients_are_observed_once():
    rule = QuantileRule(1.0, window=4)
    model = linear_model(SGD(1.0, max_norm=rule, gradient_accumulation_steps=2))
    train(model, [[6.0, 0.0], [0.0, 8.0], [60.0, 0.0], [0.0, 80.0], [1.0, 0.0]])
    assert (float(model.optimizer.last_norm), float(model.optimizer.last_max_norm)) == (50.0, 5.0)
    assert [variable.numpy().tolist() for variable in model.optimizer.variables if variable.name == "norms"] == [
        [50.0, 5.0, math.inf, math.inf]
    ]
    assert weights(model) == pytest.approx([-6.0, -8.0])


def test_steps_that_a_loss_scale_skips_are_not_observed():
    optimizer = keras.optimizers.LossScaleOptimizer(SGD(1.0, max_norm=SteadyRule(1.0, initial=9.0)), initial_scale=4.0)
    seen = recorded(linear_model(optimizer), [5.0, math.inf, math.nan, 50.0])
    assert seen == [(5.0, 9.0), (5.0, 9.0), (5.0, 9.0), (50.0, 5.0)]
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("scope", ["global", "variable", "value"])
def test_spikes_become_zeros_and_are_observed(scope):
    optimizer = SGD(1.0, max_norm=AdaptiveThreshold(QuantileRule(window=2), skip_above=2.0), scope=scope)
    variable = keras.Variable([0.0, 0.0])
    steps = []
    for size in (1.0, 1.0, 3.0, 5.0, 5.0, math.nan):
        variable.assign([0.0, 0.0])
        optimizer.apply([ops.array([0.0, size])], [variable])
        steps.append(-float(variable.numpy()[1]))
    assert steps == pytest.approx([1.0, 1.0, 2.0, 0.0, 5.0, math.nan], nan_ok=True)


class Halving(keras.callbacks.Callback):
    """Halves the threshold after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.max_norm /= 2


@pytest.mark.parametrize("settings", WAYS)
def test_a_number_set_between_steps_takes_effect_at_the_next(settings, tmp_path):
    model, recorder = linear_model(SGD(1.0, max_norm=4.0), **settings), Recorder()
    train(model, [[0.0, 6.0]] * 4, callbacks=[recorder, Halving()])
    assert recorder.seen == [(6.0, 4.0), (6.0, 2.0), (6.0, 1.0), (6.0, 0.5)]
    assert weights(model) == pytest.approx([0.0, -7.5])
    model.optimizer.max_norm = 0.1
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.max_norm == again.optimizer.get_config()["max_norm"] == 0.1
    assert 0 < 0.1 - float(again.optimizer.last_max_norm) < 1e-8
    train(again, [[0.0, 6.0]])
    assert weights(again) == pytest.approx([0.0, -7.6])


def test_weights_bring_the_number_they_were_saved_with():
    first, again, scheduled = (SGD(1.0, max_norm=given) for given in (2.0, 5.0, DECAY))
    for optimizer in (first, again, scheduled):
        updates(arrays([3.0, 4.0]), optimizer)
    stored, of_schedule = {}, {}
    first.save_own_variables(stored)
    scheduled.save_own_variables(of_schedule)
    # The last threshold of a schedule is none.
    with pytest.raises(ValueError, match="shape"):
        again.load_own_variables(of_schedule)
    assert again.max_norm == 5.0
    # Files of optimizers whose number was no variable.
    again.load_own_variables({name: stored[name] for name in list(stored)[:-1]})
    assert (again.max_norm, again.counts()) == (5.0, (1, 1))
    again.load_own_variables(stored)
    assert (again.max_norm, float(again.last_max_norm)) == (2.0, 2.0)


@pytest.mark.parametrize(("scope", "wrong"), [("global", -1.0), ("variable", math.nan), ("value", math.nan)])
def test_numbers_that_mean_nothing_are_errors_or_seen(scope, wrong):
    def schedule(step):
        return ops.where(step > 1, wrong, 1.0)

    with pytest.raises(ValueError, match="must not be negative or NaN"):
        train(linear_model(SGD(1.0, max_norm=schedule, scope=scope), run_eagerly=True), [[0.0, 6.0]] * 3)
    if keras.config.backend() != "torch":  # whose steps are not compiled by default
        model = linear_model(SGD(1.0, max_norm=schedule, scope=scope))
        train(model, [[1.0, 6.0]] * 3)
        assert math.isnan(weights(model)[1]) if math.isnan(wrong) else np.linalg.norm(weights(model)) < 2.0


def falling(step):
    return ops.where(step > 1, ops.where(step > 3, 0.5, 4.0), 8.0)


@pytest.mark.parametrize(
    ("schedule", "scope", "settings"),
    [
        (DECAY, "global", WAYS[0]),
        (falling, "variable", WAYS[1]),
        (falling, "value", WAYS[2]),
        (DECAY, "variable", WAYS[2]),
    ],
)
def test_schedules_see_the_step_of_learning_rates(schedule, scope, settings):
    model = linear_model(SGD(1.0, max_norm=schedule, scope=scope), **settings)
    recorder = Recorder()
    logs = train(model, [[0.0, 6.0]] * 5, callbacks=[recorder, ClippingMetrics()])
    assert recorder.seen == [(6.0, 8.0), (6.0, 8.0), (6.0, 4.0), (6.0, 4.0), (6.0, 0.5)]
    assert weights(model) == pytest.approx([0.0, -20.5])
    assert (logs["max_norm"], logs["clipped_share"]) == ([0.5], [0.6])


def test_plain_numbers_of_a_schedule_and_numbers_that_mean_nothing():
    optimizer = SGD(1.0, max_norm=lambda step: 2.5)
    assert float(optimizer.last_max_norm) == 0.0
    assert updates(arrays([3.0, 4.0]), optimizer)[0] == pytest.approx([1.5, 2.0])
    assert float(optimizer.last_max_norm) == 2.5
    assert float(SGD(max_norm=0.5).last_max_norm) == 0.5
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        updates(arrays([3.0, 4.0]), SGD(1.0, max_norm=lambda step: -1.0))


class Rule(QuantileRule):
    """A rule that no configuration names."""


def test_thresholds_that_are_none():
    for given, words in (
        (SpreadRule, r"got the class SpreadRule\. Pass SpreadRule\(\)"),
        (Rule(), "max_norm must be a QuantileRule, SpreadRule, SteadyRule, a number or a schedule"),
        (PrivateQuantile(), "max_norm must be a real number"),
    ):
        with pytest.raises(TypeError, match=words):
            SGD(max_norm=given)
    used = AdaptiveThreshold()
    used.observe(1.0)
    with pytest.raises(ValueError, match=r"has observed 1 norms.* Pass a new one, or its rule"):
        SGD(max_norm=used)
    config = SGD(max_norm=SpreadRule()).get_config()
    with pytest.raises(ValueError, match="the rule 'Other', which is none of QuantileRule, SpreadRule, SteadyRule"):
        SGD.from_config(config | {"max_norm": config["max_norm"] | {"rule": "Other"}})


def test_of_thresholds_set_later_only_numbers_follow_numbers():
    optimizer = SGD(1.0, max_norm=SpreadRule(window=4))
    optimizer.max_norm = 1
    assert (type(optimizer.max_norm), float(optimizer.last_max_norm)) == (float, 1.0)
    for first, later in ((SpreadRule(), 1.0), (SpreadRule(), SteadyRule()), (falling, DECAY), (1.0, falling)):
        optimizer.max_norm = first
        updates(arrays([3.0, 4.0]), optimizer)
        with pytest.raises(ValueError, match=r"only be set from a number to a number.* Make a new optimizer"):
            optimizer.max_norm = later
        assert optimizer.max_norm is first
        optimizer = SGD(1.0, max_norm=2.0)
    updates(arrays([3.0, 4.0]), optimizer)
    with pytest.raises(ValueError, match="must not be negative"):
        optimizer.max_norm = -1.0
    assert optimizer.max_norm == 2.0


@pytest.mark.parametrize("returned", [None, [1.0, 2.0], np.ones(2, np.float32)])
def test_a_schedule_that_returns_no_number_changes_nothing(returned):
    optimizer = SGD(1.0, max_norm=lambda step: returned, scope="variable")
    with pytest.raises(TypeError, match="must be one number at each step, but the schedule returned"):
        updates(arrays([3.0], [4.0]), optimizer)
    assert (float(optimizer.last_norm), optimizer.counts()) == (0.0, (0, 0))


def test_a_schedule_may_return_a_variable():
    threshold = keras.Variable(2.5)
    optimizer = SGD(1.0, max_norm=lambda step: threshold)
    assert updates(arrays([3.0, 4.0]), optimizer)[0] == pytest.approx([1.5, 2.0])


def test_variables_without_gradients_have_no_threshold():
    optimizer = SGD(1.0, max_norm=SpreadRule(), scope="variable")
    optimizer.build([])
    assert optimizer.last_max_norm.shape == (0,)
    scale, variable = keras.Variable(1.0), keras.Variable([0.0, 0.0])
    scale.overwrite_with_gradient = True  # as the scales of float8 layers
    optimizer = SGD(1.0, max_norm=SpreadRule(), scope="variable")
    for size in (1.0, 10.0):
        optimizer.apply([ops.array(7.0), ops.array([0.0, size])], [scale, variable])
    assert ops.convert_to_numpy(optimizer.last_max_norm).tolist() == [1.0]
    assert (scale.numpy().tolist(), variable.numpy().tolist()) == (7.0, pytest.approx([0.0, -2.0]))
