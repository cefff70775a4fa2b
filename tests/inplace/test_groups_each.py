"""Thresholds by names and groups in calls with a norm for each gradient or unit, and by value."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import gradclip
from frameworks import ALL, by_name

EAGER = [framework for framework in ALL if not framework.jit]
VALUES = {"encoder.weight": [[3.0, 4.0]], "encoder.bias": [[6.0, 8.0]], "head": [[0.0, 2.0]]}


def named(framework):
    return {name: SimpleNamespace(grad=framework.array(value)) for name, value in VALUES.items()}


def found(framework, held):
    return [framework.to_numpy(one.grad).astype(float).round(5).tolist() for one in held.values()]


def by_units(parameters, max_norm, **options):
    return gradclip.clip_grad_unit_norm_(parameters, max_norm, unit_axis=0, **options)


CALLS = pytest.mark.parametrize("call", [gradclip.clip_grad_layer_norm_, by_units], ids=["layers", "units"])


@CALLS
@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_each_gradient_has_its_own_norm_and_the_threshold_of_its_pattern(framework, call):
    with framework.mode():
        held = named(framework)
        norms = call(held, {"*.bias": 5.0, "encoder.*": 1.0, "*": None})
        assert [float(np.max(framework.to_numpy(norm))) for norm in norms] == [5.0, 10.0, 2.0]
        assert found(framework, held) == [[[0.6, 0.8]], [[3.0, 4.0]], [[0.0, 2.0]]]


@CALLS
@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_each_gradient_has_the_threshold_of_its_group(framework, call):
    with framework.mode():
        held = named(framework)
        weight, bias, head = held.values()
        call([{"params": [weight], "max_norm": 1.0}, {"params": [bias]}, {"params": [head], "max_norm": None}], 5.0)
        assert found(framework, held) == [[[0.6, 0.8]], [[3.0, 4.0]], [[0.0, 2.0]]]


@CALLS
def test_patterns_need_to_match_chosen_names_alone(call):
    (framework,) = (one for one in EAGER if one.name == "numpy")
    held = named(framework)
    norms = call(held, {"*.bias": 5.0}, where="*.bias")
    assert [float(np.max(norm)) for norm in norms] == [0.0, 10.0, 0.0]
    assert found(framework, held) == [[[3.0, 4.0]], [[3.0, 4.0]], [[0.0, 2.0]]]


@CALLS
def test_a_dict_for_a_tree_is_a_prefix_unless_it_has_a_wildcard(call):
    tree = {name: np.array(value) for name, value in VALUES.items()}
    norms = call(tree, {"encoder.weight": 1.0, "*": 5.0})
    assert {name: float(np.max(norm)) for name, norm in norms.items()} == dict(
        zip(VALUES, (5.0, 10.0, 2.0), strict=True)
    )
    assert [value.round(5).tolist() for value in tree.values()] == [[[0.6, 0.8]], [[3.0, 4.0]], [[0.0, 2.0]]]
    nested = {"a": [np.array([[3.0, 4.0]])], "b": np.array([[3.0, 4.0]])}
    call(nested, {"a": 1.0, "b": math.inf})
    assert nested["a"][0].round(5).tolist() == [[0.6, 0.8]]
    assert nested["b"].tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
def test_values_by_name(framework):
    with framework.mode():
        held = named(framework)
        gradclip.clip_grad_value_(held, {"*.bias": 7.0, "encoder.*": 1.0, "*": None})
        assert found(framework, held) == [[[1.0, 1.0]], [[6.0, 7.0]], [[0.0, 2.0]]]


def test_values_of_gradients_that_share_memory():
    memory = np.array([3.0, 4.0])
    held = {"a": SimpleNamespace(grad=memory), "b": SimpleNamespace(grad=memory)}
    gradclip.clip_grad_value_(held, {"a": 1.0, "b": 2.0})
    assert (held["a"].grad.tolist(), held["b"].grad.tolist()) == ([1.0, 1.0], [2.0, 2.0])


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: gradclip.clip_grad_layer_norm_(p, {"*.bia": 1.0, "*": 1.0}),
            ValueError,
            "'*.bia' of max_norm matches",
        ),
        (lambda p: by_units(p, {"*.bias": 1.0}), ValueError, "no pattern of max_norm matches encoder.weight"),
        (lambda p: by_units(list(p.values()), {"*": 1.0}), ValueError, "has no name that a pattern of max_norm could"),
        (lambda p: gradclip.clip_grad_layer_norm_(p, {"*": -1.0}), ValueError, "must not be negative"),
        (
            lambda p: gradclip.clip_grad_value_(p, {"*.bia": 1.0, "*": 1}),
            ValueError,
            "'*.bia' of clip_value matches no",
        ),
        (lambda p: gradclip.clip_grad_value_(p, {"head": -1.0, "*": 1}), ValueError, "clip_value['head'] must not be"),
        (lambda p: gradclip.clip_grad_value_(p, {1: 1.0}), TypeError, "as a dict, clip_value maps patterns"),
        (
            lambda p: gradclip.adaptive_grad_clip_(p, {"*": 1.0}, params=[np.ones((1, 2))] * 3),
            TypeError,
            "For several, call it once for each, and choose its parameters by where=.",
        ),
        (
            lambda p: gradclip.adaptive_grad_clip_([{"params": list(p.values()), "max_norm": 1.0}]),
            ValueError,
            "so do clip_grad_layer_norm_, clip_grad_unit_norm_ and",
        ),
    ],
)
def test_after_an_error_nothing_has_changed(call, error, message):
    (framework,) = (one for one in EAGER if one.name == "numpy")
    held = named(framework)
    with pytest.raises(error) as raised:
        call(held)
    assert message in str(raised.value)
    assert found(framework, held) == list(VALUES.values())
