"""One value says how examples are clipped: checked when it is made, and passed on by all that clip or promise."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from gradclip._src.core.rules import Target
from gradclip._src.private.sums import settings as per_example_settings
from gradclip._src.private.sums.settings import PerExampleSettings


def test_what_was_passed_becomes_pythons():
    made = PerExampleSettings(1, per_layer=np.True_, gamma=Fraction(1, 2), sum_dtype=np.float64)
    assert [type(x) for x in (made.per_layer, made.gamma, made.sum_dtype)] == [bool, float, str]
    assert made == PerExampleSettings(1, per_layer=True, gamma=0.5, sum_dtype="float64")
    assert type(PerExampleSettings(1.0, grid=np.int64(16)).grid) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.gamma = 1.0


def test_changed_settings_are_checked_again():
    made = PerExampleSettings(1.0, grid=16)
    for change, message in (
        ({"max_norm": 0.0}, "max_norm must be positive and finite"),
        ({"to_unit": True}, "to_unit=True needs one norm per example"),
        ({"rule": "auto"}, "rule must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(made, **change)


@pytest.mark.parametrize(("rule", "gamma"), [("clip", None), ("normalize", 0.0), ("automatic", 0.5)])
@pytest.mark.parametrize(("to_unit", "length"), [(False, None), (True, 1.0)])
def test_what_examples_are_scaled_to(rule, gamma, to_unit, length):
    assert PerExampleSettings(1.0, rule=rule, gamma=0.5, to_unit=to_unit).target == Target(length, gamma)


def loss(w, x):
    return (w * x).sum()


def test_settings_are_checked_once_and_not_for_each_microbatch(monkeypatch):
    checked = []
    check = per_example_settings._checked_gamma
    monkeypatch.setattr(per_example_settings, "_checked_gamma", lambda gamma: checked.append(gamma) or check(gamma))
    clipped = gradclip.clipped_grad(loss, 1.0, microbatch_size=2)
    clipped(jnp.ones(2), jnp.ones((6, 2)))
    clipped.sensitivity("replace_one")
    assert checked == [0.01]


def test_a_function_of_other_settings_clips_and_promises_by_them():
    clipped = gradclip.clipped_grad(loss, 1.0, pad_to=4)
    other = dataclasses.replace(clipped, _settings=dataclasses.replace(clipped._settings, max_norm=2.0))
    assert (clipped.max_norm, other.max_norm) == (1.0, 2.0)
    row = jnp.array([[3.0, 4.0]])
    np.testing.assert_allclose(clipped(jnp.ones(2), row), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(other(jnp.ones(2), row), [1.2, 1.6], rtol=1e-6)
    assert (clipped.sensitivity().bound, other.sensitivity().bound) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"unit": "user"}, ValueError, "unit must be 'example' or 'group'"),
        ({"pad_to": 0}, ValueError, "pad_to must be a whole number"),
        ({"normalize_by": 0.0}, ValueError, "normalize_by must be positive"),
        ({"has_aux": 1}, TypeError, "has_aux must be True or False"),
        ({"fun": None}, TypeError, "fun must be a function"),
    ],
)
def test_a_function_that_is_changed_is_checked_again(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(gradclip.clipped_grad(loss, 1.0), **change)


def test_functions_and_settings_are_copied_and_pickled():
    clipped = gradclip.clipped_grad(loss, {"w": 1.0}, rule="automatic", pad_to=4)
    for again in (pickle.loads(pickle.dumps(clipped)), copy.deepcopy(clipped)):
        assert again._settings == clipped._settings
        assert again.sensitivity() == clipped.sensitivity()


ROWS = {"w": np.array([[3.0, 4.0], [0.3, 0.4]])}


WRONG = [
    ({"rule": "auto"}, ValueError, "rule must be one of 'clip', 'normalize', 'automatic', got 'auto'"),
    ({"rule": ["clip"]}, ValueError, "rule must be one of"),
    ({"gamma": -1.0}, ValueError, "gamma must be a finite number > 0, got -1.0"),
    ({"gamma": True}, ValueError, "gamma must be a finite number > 0, got True"),
    ({"gamma": 10**400}, ValueError, "gamma must be a finite number > 0, got an integer of 1329 bits"),
    ({"nonfinite": "ignore"}, ValueError, "nonfinite must be one of"),
    ({"sum_dtype": "float16"}, ValueError, "sum_dtype must be float32, float64 or None"),
    ({"grid": 1.5}, ValueError, "grid must be the number of steps"),
    ({"grid": 2**60}, ValueError, "grid must be the number of steps"),
    ({"grid": 16, "sum_dtype": "float32"}, ValueError, "Leave out sum_dtype"),
    ({"grid": 16, "max_norm": 0.0}, ValueError, "max_norm must be positive and finite"),
    ({"max_norm": None}, TypeError, "max_norm must be a real number"),
    ({"max_norm": {}}, ValueError, "max_norm holds no thresholds"),
    ({"max_norm": {"w": 1.0}, "per_layer": True}, ValueError, "per_layer=True needs one number"),
]


@pytest.mark.parametrize(("settings", "error", "message"), WRONG)
def test_how_examples_are_clipped_is_checked_when_a_function_is_made(settings, error, message):
    settings = {"max_norm": 1.0} | settings
    for make in (
        lambda **settings: gradclip.clipped_grad(loss, **settings),
        lambda **settings: gradclip.clipped_fun(lambda x: x, **settings),
        lambda **settings: gradclip.per_example_clip(ROWS, **settings),
    ):
        with pytest.raises(error, match=message):
            make(**settings)


@pytest.mark.parametrize("gamma", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5])
def test_numbers_of_any_kind_are_numbers(gamma):
    summed, _ = gradclip.per_example_clip(np.array([[3.0, 4.0]]), 1.0, rule="automatic", gamma=gamma)
    np.testing.assert_allclose(summed, [3 / 5.5, 4 / 5.5], rtol=1e-9)
