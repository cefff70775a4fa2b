from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip


def holders(framework, *grads):
    return [SimpleNamespace(grad=None if grad is None else framework.array(*grad)) for grad in grads]


def test_each_gradient_is_clipped_by_its_own_norm(framework):
    if framework.jit:
        return
    parameters = holders(framework, ([3.0, 4.0],), None, ([0.3, 0.4],), ([0.0],))
    kept = parameters[2].grad
    with framework.mode():
        norms = gradclip.clip_grad_layer_norm_(parameters, 1.0)
    assert [None if n is None else round(float(n), 6) for n in norms] == [5.0, None, 0.5, 0.0]
    found = [None if p.grad is None else framework.to_numpy(p.grad).round(6).tolist() for p in parameters]
    assert [found[0], found[1], found[3]] == [[np.float32(0.6), np.float32(0.8)], None, [0.0]]
    assert framework.to_numpy(parameters[2].grad).tolist() == framework.to_numpy(kept).tolist()


def test_each_has_a_threshold_of_its_own():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    norms = gradclip.clip_grad_layer_norm_(model.named_parameters(), [2.0, torch.tensor(10.0)])
    assert [float(norm) for norm in norms] == [4.0, float(np.float32(np.sqrt(8)))]
    assert torch.allclose(model[0].weight.grad, torch.ones(2, 2))
    assert torch.equal(model[1].weight.grad, torch.full((1, 2), 2.0))


def test_trees_take_prefixes():
    tree = {"a": {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}, "z": np.array([8.0])}
    norms = gradclip.clip_grad_layer_norm_(tree, {"a": 6.5, "z": 9.0})
    assert {key: float(norm) for key, norm in norms.items()} == {"a": 13.0, "z": 8.0}
    assert tree["a"]["w"].round(6).tolist() == [1.5, 2.0]
    assert tree["a"]["b"].round(6).tolist() == [6.0]
    assert tree["z"].tolist() == [8.0]


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_as_the_functional_call(ord, dtype):
    rng = np.random.default_rng(5)
    tree = {str(i): (rng.standard_normal(i + 1) * 10.0**i).astype(dtype) for i in range(4)}
    clipped, norms = gradclip.clip_by_layer_norm(tree, 1.5, ord=ord)
    found = gradclip.clip_grad_layer_norm_(tree, 1.5, ord=ord)
    assert all(x.dtype == dtype for x in tree.values())
    assert all(np.allclose(tree[key], clipped[key], rtol=1e-14, atol=0) for key in tree)
    assert all(np.allclose(found[key], norms[key], rtol=1e-14, atol=0) for key in tree)


def test_a_shared_gradient_is_clipped_to_the_threshold_of_each_parameter():
    shared = np.array([3.0, 4.0])
    one, other = parameters = [SimpleNamespace(grad=shared), SimpleNamespace(grad=shared)]
    assert [float(n) for n in gradclip.clip_grad_layer_norm_([*parameters, one], [2.5, 1.0, 2.5])] == [5.0] * 3
    assert [one.grad.round(6).tolist(), other.grad.round(6).tolist()] == [[1.5, 2.0], [0.6, 0.8]]
    assert one.grad is shared
    for call in (
        lambda: gradclip.clip_grad_layer_norm_([one, one], [1.0, 2.0]),
        lambda: gradclip.clip_grad_layer_norm_({"a": [shared, np.ones(1)], "b": shared}, {"a": 1.0, "b": 1.0}),
        lambda: gradclip.clip_grad_layer_norm_([shared[:1], shared[:1]], 1.0),
    ):
        with pytest.raises(ValueError, match=r"occurs twice|share memory"):
            call()
    assert shared.round(6).tolist() == [1.5, 2.0]


@pytest.mark.after_error
def test_errors_change_nothing():
    parameters = [SimpleNamespace(grad=np.array([3.0, 4.0])), SimpleNamespace(grad=np.array([np.nan]))]
    layers = gradclip.clip_grad_layer_norm_
    for call, error, message in (
        (lambda: layers(parameters, 1.0, nonfinite="raise"), FloatingPointError, "parameters"),
        (lambda: layers(parameters, [1.0]), ValueError, "one number for each of the 2 parameters"),
        (lambda: layers(parameters, [1.0, -1.0]), ValueError, "must not be negative"),
        (lambda: layers(parameters, [1.0, "x"]), TypeError, "must be a real number"),
        (lambda: layers([3], 1.0), TypeError, "which has no"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert parameters[0].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("policy", "result"), [("propagate", [np.nan]), ("drop", [0.0]), ("zero", [0.0])])
def test_policies_are_those_of_a_layer(policy, result):
    parameters = [SimpleNamespace(grad=np.array([3.0, 4.0])), SimpleNamespace(grad=np.array([np.nan]))]
    gradclip.clip_grad_layer_norm_(parameters, 1.0, nonfinite=policy)
    assert parameters[0].grad.round(6).tolist() == [0.6, 0.8]
    assert np.array_equal(parameters[1].grad, result, equal_nan=True)


@pytest.mark.after_error
@pytest.mark.parametrize("max_norm", [{1.0, 2.0}, iter([1.0, 2.0]), np.ones(2), torch.ones(2)], ids=lambda x: type(x))
def test_thresholds_without_an_order_or_in_one_array_are_refused(framework, max_norm):
    parameters = holders(framework, ([3.0, 4.0],), ([6.0, 8.0],))
    with pytest.raises(TypeError, match=r"a number, or a list with one number for each of the 2 parameters, in order"):
        gradclip.clip_grad_layer_norm_(parameters, max_norm)
    assert [framework.to_numpy(p.grad).tolist() for p in parameters] == [[3.0, 4.0], [6.0, 8.0]]


def holder():
    return SimpleNamespace(grad=torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("threshold", [Fraction(1, 3), Fraction(10, 3), 2**53 + 1, np.float32(0.1), torch.tensor(0.5)])
def test_thresholds_of_layers_in_place_are_any_numbers(threshold):
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norms = gradclip.clip_grad_layer_norm_([SimpleNamespace(grad=gradient)], threshold)
    assert [float(norm) for norm in norms] == [5.0]
    assert float(gradient.norm()) == pytest.approx(min(5.0, float(threshold)), rel=1e-9)


@pytest.mark.after_error
@pytest.mark.parametrize("thresholds", [{1.0}, len, iter([1.0])])
def test_thresholds_of_parameters_stand_in_order(thresholds):
    gradient = holder()
    with pytest.raises(
        TypeError, match="max_norm must be a number, or a list with one number for each of the 1 parameters"
    ):
        gradclip.clip_grad_layer_norm_([gradient], thresholds)
    assert gradient.grad.tolist() == [3.0, 4.0]


def read_only(*numbers):
    array = np.array(numbers)
    array.flags.writeable = False
    return array


def test_non_finite_gradients_set_to_zero_do_not_replace_or_mark_those_that_stay():
    grads = [read_only(np.nan, 3.0), read_only(0.3, 0.4), read_only(3.0, 4.0), read_only(np.inf, 0.5), read_only()]
    parameters = [SimpleNamespace(grad=grad) for grad in grads]
    gradclip.clip_grad_layer_norm_(parameters, 1.0, nonfinite="zero")
    assert [p.grad is grad for p, grad in zip(parameters, grads, strict=True)] == [False, True, False, False, True]
    assert parameters[3].grad.tolist() == [0.0, 0.5]

    marked = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter, numbers in zip(marked, ([np.nan, 0.5], [0.3, 0.4], [3.0, 4.0]), strict=True):
        parameter.grad = torch.tensor(numbers)
    before = [parameter.grad._version for parameter in marked]
    gradclip.clip_grad_layer_norm_(marked, 1.0, nonfinite="zero")
    assert [p.grad._version - v for p, v in zip(marked, before, strict=True)] == [1, 0, 1]
