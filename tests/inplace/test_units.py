"""Units clipped in place: as by the functional calls, and nothing written where something is wrong."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name

EAGER = [framework for framework in ALL if not framework.jit]


def drawn(framework, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((4, 3), (3,), (2, 3, 2, 2), ())
    return [
        framework.array(rng.normal(size=shape) * 10.0 ** rng.integers(-2, 2), framework.dtypes[-1]) for shape in shapes
    ]


def same(framework, left, right):
    return all(
        framework.to_numpy(a).tobytes() == framework.to_numpy(b).tobytes() for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ord", [1, 2])
def test_as_the_functional_call(framework, adaptive, ord):
    grads, weights = drawn(framework), drawn(framework, 1)
    holders = [SimpleNamespace(grad=grad) for grad in [*grads, None]]
    with framework.mode():
        if adaptive:
            expected, norms = gradclip.adaptive_grad_clip(grads, weights, clipping=0.3, ord=ord)
            found = gradclip.adaptive_grad_clip_(holders, 0.3, ord=ord, params=[*weights, None])
        else:
            expected, norms = gradclip.clip_by_unit_norm(grads, 0.7, ord=ord)
            found = gradclip.clip_grad_unit_norm_(holders, 0.7, ord=ord)
    assert found[-1] is None
    assert same(framework, found[:-1], norms)
    assert same(framework, [holder.grad for holder in holders[:-1]], expected)
    written = framework.name.startswith("torch") or framework.name == "numpy"
    assert not written or all(holder.grad is grad for holder, grad in zip(holders, grads, strict=False))


def test_parameters_of_a_module():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    model(torch.randn(5, 2, 4, 4)).square().sum().backward()
    parameters = dict(model.named_parameters())
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    expected, norms = gradclip.adaptive_grad_clip(
        {n: p.grad.clone() for n, p in parameters.items()}, weights, clipping=0.05
    )
    version = model[0].weight.grad._version
    found = gradclip.adaptive_grad_clip_(model.named_parameters(), 0.05)
    assert model[0].weight.grad._version > version
    for (name, parameter), norm in zip(parameters.items(), found, strict=True):
        assert torch.equal(parameter.grad, expected[name])
        assert torch.equal(norm, norms[name])
        assert torch.equal(parameter, weights[name])
        assert not norm.requires_grad
    assert found[0].shape == (3,)


def test_a_list_of_thresholds_or_a_prefix():
    parameters = [SimpleNamespace(grad=torch.tensor([[3.0, 4.0], [0.3, 0.4]])) for _ in range(2)]
    gradclip.clip_grad_unit_norm_(parameters, [1.0, torch.tensor(2.5)])
    assert np.allclose([p.grad[0] for p in parameters], [[0.6, 0.8], [1.5, 2.0]], rtol=1e-6)
    assert [p.grad[1].tolist() for p in parameters] == [np.float32([0.3, 0.4]).tolist()] * 2
    tree = {"a": {"w": np.array([[3.0], [4.0]]), "b": np.array([12.0])}, "z": np.array([8.0])}
    norms = gradclip.clip_grad_unit_norm_(tree, {"a": 2.5, "z": 9.0})
    assert norms["a"]["w"].tolist() == 5.0
    assert tree["a"]["w"].round(6).tolist() == [[1.5], [2.0]]
    assert (tree["a"]["b"].round(6).tolist(), tree["z"].tolist()) == ([2.5], [8.0])


def test_nothing_is_written_where_all_units_are_kept():
    gradient = torch.ones(2, 3)
    version = gradient._version
    gradclip.clip_grad_unit_norm_(SimpleNamespace(grad=gradient), 10.0)
    assert gradient._version == version


def test_a_shared_gradient_is_clipped_for_each_parameter():
    shared, weight = np.array([[3.0, 4.0]]), np.ones((1, 2))
    holders = [SimpleNamespace(grad=shared), SimpleNamespace(grad=shared)]
    norms = gradclip.clip_grad_unit_norm_(holders, [2.5, 1.0])
    assert [x.tolist() for x in norms] == [5.0, 5.0]
    assert [h.grad.round(6).tolist() for h in holders] == [[[1.5, 2.0]], [[0.6, 0.8]]]
    assert holders[0].grad is shared
    holders[1].grad = shared
    gradclip.adaptive_grad_clip_([*holders, holders[0]], params=[weight, 2.0 * weight, weight])
    lengths = [np.linalg.norm(h.grad) for h in holders]
    np.testing.assert_allclose(lengths, [0.01 * 2**0.5, 0.02 * 2**0.5], rtol=1e-12)
    with pytest.raises(ValueError, match="listed twice, with two different weights"):
        gradclip.adaptive_grad_clip_([holders[0]] * 2, params=[weight, weight + 1.0])
    views = {"a": shared, "b": shared.T}
    with pytest.raises(ValueError, match="share memory"):
        gradclip.clip_grad_unit_norm_(views, 1.0)


@pytest.mark.parametrize("framework", EAGER, ids=by_name)
@pytest.mark.parametrize(
    ("policy", "expected"),
    [("propagate", [math.nan, math.nan]), ("zero", [0.0, 0.5]), ("drop", [0.0, 0.0])],
)
def test_policies_are_those_of_a_unit(framework, policy, expected):
    holder = SimpleNamespace(grad=framework.array([[math.nan, 0.5], [3.0, 4.0]], framework.dtypes[-1]))
    with framework.mode():
        gradclip.clip_grad_unit_norm_(holder, 1.0, unit_axis=0, nonfinite=policy)
    found = framework.to_numpy(holder.grad)
    assert np.array_equal(found[0].real, expected, equal_nan=True)
    assert np.allclose(found[1], [0.6, 0.8], rtol=1e-6)


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: gradclip.clip_grad_unit_norm_(p, 0.1, nonfinite="raise"),
            FloatingPointError,
            r"parameters\[1\].grad",
        ),
        (lambda p: gradclip.clip_grad_unit_norm_(p, [0.1]), ValueError, "one number for each of the 2 parameters"),
        (lambda p: gradclip.clip_grad_unit_norm_(p, -1.0), ValueError, "max_norm must not be negative"),
        (
            lambda p: gradclip.clip_grad_unit_norm_(p, 1.0, unit_axis=2),
            ValueError,
            r"unit_axis is 2, but parameters\[0\]",
        ),
        (
            lambda p: gradclip.adaptive_grad_clip_(p),
            TypeError,
            r"parameters\[0\] is of type SimpleNamespace, not an array",
        ),
        (lambda p: gradclip.adaptive_grad_clip_(p, -1.0, params=[1, 2]), ValueError, "clipping must not be negative"),
        (
            lambda p: gradclip.adaptive_grad_clip_(p, params=[1.0]),
            ValueError,
            "one array for each of the 2 parameters",
        ),
        (lambda p: gradclip.adaptive_grad_clip_(p, params=1.0), ValueError, "one array for each of the 2 parameters"),
        (lambda p: gradclip.adaptive_grad_clip_(p, params=[torch.ones(2)] * 2), ValueError, "the same shape"),
        (
            lambda p: gradclip.adaptive_grad_clip_(p, params=[np.ones((2, 2))] * 2),
            TypeError,
            "arrays of one framework",
        ),
        (
            lambda p: gradclip.adaptive_grad_clip_(p, params=["x"] * 2),
            TypeError,
            "got 'x' of type str at the parameter",
        ),
        (lambda p: gradclip.adaptive_grad_clip_({"w": np.ones(2)}), TypeError, "Pass the parameters as params="),
        (lambda p: gradclip.adaptive_grad_clip_({"w": np.ones(2)}, params=[1.0]), ValueError, "same structure"),
    ],
)
def test_errors_change_nothing(call, error, message):
    parameters = [SimpleNamespace(grad=torch.full((2, 2), x)) for x in (3.0, math.nan)]
    with pytest.raises(error, match=message):
        call(parameters)
    assert parameters[0].grad.tolist() == [[3.0, 3.0]] * 2


def test_sparse_gradients_have_no_units():
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    for call in (lambda p: gradclip.clip_grad_unit_norm_(p, 1.0), gradclip.adaptive_grad_clip_):
        with pytest.raises(TypeError, match=r"units must be in dense arrays, got .* at parameters\[0\].grad"):
            call(layer.parameters())


def test_gradients_that_cannot_be_written_are_replaced():
    read_only = np.array([[3.0, 4.0], [0.0, 0.0]])
    read_only.flags.writeable = False
    holders = [SimpleNamespace(grad=read_only), SimpleNamespace(grad=np.ones(2))]
    gradclip.clip_grad_unit_norm_(holders, 2.5, unit_axis=0)
    assert holders[0].grad.round(6).tolist() == [[1.5, 2.0], [0.0, 0.0]]
    assert read_only.tolist() == [[3.0, 4.0], [0.0, 0.0]]
    holder = SimpleNamespace(grad=jnp.ones((2, 2)))
    gradclip.adaptive_grad_clip_(holder, 0.5, params=[np.ones((2, 2))])
    assert np.allclose(holder.grad, 0.5, rtol=1e-6)
