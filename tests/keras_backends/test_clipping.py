"""What an update is made of, on each backend."""

import doctest
import math

import keras
import numpy as np
import pytest
from keras import ops

import gradclip
from gradclip.integrations import keras as integration
from gradclip.integrations.keras import clipped
from keras_backends.known_gradients import SGD, arrays, squared_norm, updates

GRADIENTS = arrays([[3.0, 4.0]], [12.0])
BUILT_IN = {
    cls
    for cls in vars(keras.optimizers).values()
    if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
} - {keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer}


@pytest.mark.parametrize(
    ("scope", "max_norm", "expected", "norm"),
    [
        ("global", 6.5, [[[1.5, 2.0]], [6.0]], 13.0),
        ("variable", 2.5, [[[1.5, 2.0]], [2.5]], 12.0),
        ("value", 3.5, [[[3.0, 3.5]], [3.5]], 12.0),
    ],
)
def test_scopes(scope, max_norm, expected, norm):
    optimizer = SGD(learning_rate=1.0, max_norm=max_norm, scope=scope)
    for update, wanted in zip(updates(GRADIENTS, optimizer), expected, strict=True):
        assert update == pytest.approx(np.array(wanted), rel=3e-7)
        assert (update <= np.array(wanted)).all()
    assert (float(optimizer.last_norm), float(optimizer.clipped_share)) == (norm, 1.0)


@pytest.mark.parametrize("scope", ["global", "variable", "value"])
@pytest.mark.parametrize("max_norm", [13.0, math.inf])
def test_what_lies_below_the_threshold_stays_as_it_is(scope, max_norm):
    optimizer = SGD(learning_rate=1.0, max_norm=max_norm, scope=scope)
    assert [update.tolist() for update in updates(GRADIENTS, optimizer)] == [[[3.0, 4.0]], [12.0]]
    assert float(optimizer.clipped_share) == 0.0


def test_the_bound_holds_exactly_where_that_of_keras_does_not():
    rng = np.random.default_rng(0)
    drawn = [[rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=7).astype(np.float32)] for _ in range(50)]

    def exceeded(make):
        return sum(squared_norm(updates(gradients, make())) > 1 for gradients in drawn)

    assert exceeded(lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0)) > 10
    assert exceeded(lambda: SGD(1.0, max_norm=1.0)) == 0


def test_norms_do_not_overflow_where_those_of_keras_do():
    (update,) = updates(arrays([3e30, 4e30]), keras.optimizers.SGD(1.0, global_clipnorm=5.0))
    assert np.isnan(update).all()
    optimizer = SGD(learning_rate=1.0, max_norm=5.0)
    (update,) = updates(arrays([3e30, 4e30]), optimizer)
    assert update == pytest.approx([3.0, 4.0], rel=1e-6)
    assert float(optimizer.last_norm) == pytest.approx(5e30)


def test_norm_and_share_follow_the_updates():
    optimizer = SGD(learning_rate=1.0, max_norm=1.0)
    assert (float(optimizer.last_norm), float(optimizer.clipped_share)) == (0.0, 0.0)
    variable = keras.Variable([0.0, 0.0])
    seen = []
    for scale in (1.0, 0.1, 2.0, 0.2):
        optimizer.apply_gradients([(ops.array([3.0 * scale, 4.0 * scale]), variable)])
        seen.append((round(float(optimizer.last_norm), 6), round(float(optimizer.clipped_share), 6)))
    assert seen == [(5.0, 1.0), (0.5, 0.5), (10.0, 0.666667), (1.0, 0.5)]


def test_nonfinite_gradients():
    gradients = arrays([math.nan, 4.0], [3.0])

    def made(policy):
        return np.concatenate(updates(gradients, SGD(1.0, max_norm=1.0, nonfinite=policy)))

    assert np.isnan(made("propagate")).all()
    assert made("zero") == pytest.approx([0.0, 0.8, 0.6])
    assert made("drop").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(FloatingPointError):
        made("raise")


@pytest.mark.parametrize(("policy", "norm"), [("propagate", math.nan), ("drop", 5.0), ("zero", 5.0)])
def test_a_variable_with_nan_hides_the_clipping_of_no_other(policy, norm):
    optimizer = SGD(1.0, max_norm=1.0, scope="variable", nonfinite=policy)
    _, update, _ = updates(arrays([math.nan, 0.5], [3.0, 4.0], [0.25]), optimizer)
    assert update == pytest.approx([0.6, 0.8])
    assert (float(optimizer.last_norm), float(optimizer.clipped_share)) == (pytest.approx(norm, nan_ok=True), 1.0)


def test_without_a_variable_that_counts_the_norm_is_nan():
    optimizer = SGD(1.0, max_norm=1.0, scope="variable", nonfinite="drop")
    updates(arrays([math.nan], [math.nan, 1.0]), optimizer)
    assert math.isnan(float(optimizer.last_norm))
    assert float(optimizer.clipped_share) == 0.0


def test_variables_without_gradients_are_left_out():
    optimizer = SGD(1.0, max_norm=1.0)
    variables = [keras.Variable([0.0, 0.0]), keras.Variable([7.0])]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([ops.array([3.0, 4.0]), None], variables)
    assert variables[0].numpy() == pytest.approx([-0.6, -0.8])
    assert variables[1].numpy().tolist() == [7.0]


def test_a_class_is_made_once():
    made = clipped(keras.optimizers.Adam)
    assert made is clipped(keras.optimizers.Adam) is clipped(type(keras.optimizers.Adam())) is clipped(made)
    assert made.__name__ == "ClippedAdam"


@pytest.mark.parametrize("cls", sorted(BUILT_IN, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_every_optimizer_of_keras(cls):
    # What Keras makes of the class on this backend, as PyTorch's updates of all variables at once.
    assert issubclass(clipped(cls), type(cls()))
    optimizer = clipped(cls)(learning_rate=0.5, max_norm=1.0)
    clipped_before = SGD(1.0, max_norm=1.0)
    gradients = arrays([[3.0, 4.0], [0.0, 12.0]], [84.0])
    expected = updates(updates(gradients, clipped_before), cls(learning_rate=0.5))
    for update, wanted in zip(updates(gradients, optimizer), expected, strict=True):
        assert update == pytest.approx(wanted, rel=1e-6)
    assert (float(optimizer.last_norm), float(optimizer.clipped_share)) == (85.0, 1.0)


def test_inner_optimizers_of_a_multi_optimizer_clip():
    inner = SGD(learning_rate=1.0, max_norm=1.0)
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: inner)
    assert updates(arrays([3.0, 4.0]), optimizer)[0] == pytest.approx([0.6, 0.8])
    assert float(inner.last_norm) == 5.0


@pytest.mark.parametrize("own", [{"clipnorm": 1.0}, {"global_clipnorm": 2.0}, {"clipvalue": 0.5}])
def test_clipping_of_keras_beside_it(own):
    ((name, value),) = own.items()
    with pytest.raises(ValueError, match=f"max_norm and Keras' own {name}={value} both clip"):
        SGD(1.0, max_norm=1.0, **own)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_norm": -1.0}, "max_norm must not be negative or NaN"),
        ({"max_norm": math.nan}, "max_norm must not be negative or NaN"),
        ({"max_norm": 1.0, "scope": "layer"}, "scope must be one of 'global', 'variable', 'value', got 'layer'"),
        ({"max_norm": 1.0, "scope": ["global"]}, r"scope must be one of .*, got \['global'\]"),
        ({"max_norm": 1.0, "nonfinite": "ignore"}, "nonfinite must be one of"),
        ({"max_norm": 1.0, "scope": "value", "nonfinite": "zero"}, "scope='value' has none"),
    ],
)
def test_settings_that_mean_nothing(settings, words):
    with pytest.raises(ValueError, match=words):
        SGD(learning_rate=1.0, **settings)


def test_a_threshold_is_asked_for():
    with pytest.raises(TypeError, match="max_norm"):
        SGD(learning_rate=1.0)


@pytest.mark.parametrize("wrong", [keras.optimizers.Adam(), keras.layers.Dense, "adam"])
def test_what_is_no_class_of_optimizers(wrong):
    with pytest.raises(TypeError, match="clipped takes a class of Keras optimizers"):
        clipped(wrong)


@pytest.mark.parametrize("wrapper", [keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer])
def test_what_passes_gradients_on(wrapper):
    with pytest.raises(TypeError, match="passes gradients on"):
        clipped(wrapper)


def test_the_example_in_the_docstring():
    results = doctest.testmod(integration)
    assert (results.failed, results.attempted) == (0, 5)


def test_variables_say_what_to_pass():
    variable = keras.Variable([3.0, 4.0])
    with pytest.raises(TypeError, match=r"of type \w+ at \[0\]. Pass its \.value\."):
        gradclip.clip_by_global_norm([variable], 1.0)
    with pytest.raises(TypeError, match=r"argument 0 holds a \w+, not an array: pass \[v\.value"):
        gradclip.clipped_grad(lambda w, x: 0.0, 1.0)([variable], variable.value)
