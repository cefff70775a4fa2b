from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from frameworks import DTYPES
from gradclip._src.inplace.norm import clip_grads_with_norm_


def holders(framework, *grads):
    return [SimpleNamespace(grad=None if grad is None else framework.array(*grad)) for grad in grads]


def values(framework, parameters):
    return [None if p.grad is None else framework.to_numpy(p.grad).tolist() for p in parameters]


def inplace(framework, function, parameters, *args, **kwargs):
    with framework.mode():
        return function(parameters, *args, **kwargs)


@pytest.fixture
def parameter():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    return p


def test_clips_in_place_and_returns_the_norm_before(framework):
    parameters = holders(framework, ([3.0],), None, ([[4.0]],))
    grads = [p.grad for p in parameters]
    assert float(inplace(framework, gradclip.grad_norm, parameters)) == 5.0
    assert float(inplace(framework, gradclip.clip_grad_norm_, parameters, 1.0)) == 5.0
    got = values(framework, parameters)
    assert got[1] is None
    np.testing.assert_allclose([got[0][0], got[2][0][0]], [0.6, 0.8], rtol=2e-7)
    if not framework.immutable:
        assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))


def test_not_clipped_means_not_written(framework):
    parameters = holders(framework, ([3.0, 4.0],))
    grad = parameters[0].grad
    if framework.name == "numpy":
        grad.flags.writeable = False
    version = getattr(grad, "_version", None)
    assert float(inplace(framework, gradclip.clip_grad_norm_, parameters, 5.0)) == 5.0
    assert parameters[0].grad is grad or framework.name.startswith(("jax", "mlx-"))
    if not framework.traced:
        assert values(framework, parameters) == [[3.0, 4.0]]
        assert getattr(grad, "_version", None) == version


def test_orders_and_policies(framework):
    parameters = holders(framework, ([3.0, -4.0],))
    assert float(inplace(framework, gradclip.clip_grad_norm_, parameters, 2.0, "inf")) == 4.0
    np.testing.assert_allclose(values(framework, parameters)[0], [1.5, -2.0], rtol=2e-7)
    for policy, expected in (("drop", [0.0, 0.0]), ("zero", [1.0, 0.0]), ("propagate", [np.nan, np.nan])):
        parameters = holders(framework, ([3.0, np.nan],))
        inplace(framework, gradclip.clip_grad_norm_, parameters, 1.0, nonfinite=policy)
        np.testing.assert_allclose(values(framework, parameters)[0], expected, rtol=2e-7)


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("max_norm", "kwargs", "error"),
    [
        (-1.0, {}, ValueError),
        (float("nan"), {}, ValueError),
        ("1", {}, TypeError),
        (1.0, {"ord": "fro"}, ValueError),
        (1.0, {"ord": 0.5}, ValueError),
        (1.0, {"nonfinite": "ignore"}, ValueError),
        (1.0, {"nonfinite": "raise"}, FloatingPointError),
    ],
)
def test_errors_leave_the_gradients_as_they_were(framework, max_norm, kwargs, error):
    parameters = holders(framework, ([3.0, 4.0],), ([np.inf, 1.0],))
    with pytest.raises(error):
        inplace(framework, gradclip.clip_grad_norm_, parameters, max_norm, **kwargs)
    assert values(framework, parameters) == [[3.0, 4.0], [np.inf, 1.0]]


def test_raise_names_the_parameter(framework):
    with pytest.raises(FloatingPointError, match=r"1 of 2 leaves: parameters\[1\]\.grad: 0 NaN, 1 infinite of 1"):
        inplace(framework, gradclip.clip_grad_norm_, holders(framework, ([3.0],), ([np.inf],)), 1.0, nonfinite="raise")


@pytest.mark.after_error
def test_integers_can_be_refused_before_anything_is_written(framework):
    parameters = holders(framework, ([3.0, 4.0],), ([30, 40], "int32"))
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_value_, gradclip.clip_grad_layer_norm_):
        with pytest.raises(TypeError, match=r"refuses integers: parameters\[1\]\.grad has dtype int32"):
            inplace(framework, call, parameters, 1.0, integers="raise")
    assert values(framework, parameters) == [[3.0, 4.0], [30, 40]]


@pytest.mark.parametrize("parameters", [3, [3], [None], {"w": 1}, [("name", 3)], "text"])
def test_things_without_gradients(parameters):
    for call in (
        gradclip.grad_norm,
        lambda p: gradclip.clip_grad_norm_(p, 1.0),
        lambda p: gradclip.clip_grad_value_(p, 1),
    ):
        with pytest.raises(TypeError, match=r"\.grad"):
            call(parameters)


def test_gradients_in_place_of_parameters():
    for call in (gradclip.grad_norm, lambda p: gradclip.clip_grad_norm_(p, 1.0)):
        with pytest.raises(ValueError, match="looks like a gradient"):
            call([torch.tensor([3.0, 4.0])])


def test_an_exhausted_generator():
    generator = torch.nn.Linear(2, 2).parameters()
    assert len(list(generator)) == 2
    with pytest.raises(ValueError, match="used up by an earlier loop"):
        gradclip.clip_grad_norm_(generator, 1.0)


def test_nothing_to_clip():
    assert float(gradclip.clip_grad_norm_([], 1.0)) == 0.0
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        norm = gradclip.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0)
    assert isinstance(norm, torch.Tensor)
    assert float(norm) == 0.0


def test_tied_parameters_count_once_and_a_shared_gradient_for_each(parameter):
    twin = torch.nn.Parameter(torch.zeros(2))
    twin.grad = parameter.grad
    assert float(gradclip.clip_grad_norm_([parameter, parameter, twin], 1.0)) == pytest.approx(50**0.5, rel=1e-6)
    np.testing.assert_allclose(parameter.grad, np.array([3.0, 4.0]) / 50**0.5, rtol=4e-7)
    assert twin.grad is parameter.grad


def test_several_dtypes_at_once(framework):
    kinds = [dtype for dtype in DTYPES if dtype in framework.dtypes]
    parameters = holders(framework, *[([3.0, 4.0], dtype) for dtype in kinds])
    norm = float(inplace(framework, gradclip.clip_grad_norm_, parameters, 1.0))
    assert norm == pytest.approx(5.0 * len(kinds) ** 0.5)
    for p, dtype in zip(parameters, kinds, strict=True):
        assert framework.to_numpy(p.grad).dtype.name == dtype
        scale = 5.0 * len(kinds) ** 0.5
        np.testing.assert_allclose(framework.to_numpy(p.grad).astype(complex), np.array([3, 4]) / scale, rtol=2.0**-7)


def test_clip_grad_value(framework):
    parameters = holders(framework, ([-3.0, 0.5, np.nan],), None, ([0.3, 9.0], "float16"))
    inplace(framework, gradclip.clip_grad_value_, parameters, 0.7)
    got = values(framework, parameters)
    np.testing.assert_array_equal(got[0], [-float(np.float32(0.7)), 0.5, np.nan])
    assert 0.699 < got[2][1] <= 0.7
    with pytest.raises(TypeError, match="cannot be clipped by value"):
        inplace(framework, gradclip.clip_grad_value_, holders(framework, ([1j], "complex64")), 1.0)
    with pytest.raises(ValueError, match="clip_value must not be negative"):
        inplace(framework, gradclip.clip_grad_value_, parameters, -1.0)


def test_read_only_arrays_are_replaced():
    p = SimpleNamespace(grad=np.array([3.0, 4.0]))
    p.grad.flags.writeable = False
    old = p.grad
    gradclip.clip_grad_norm_(p, 1.0)
    assert old.tolist() == [3.0, 4.0]
    assert p.grad.round(6).tolist() == [0.6, 0.8]


def test_a_norm_that_is_known_already(framework):
    parameters = holders(framework, ([3.0, 4.0],))
    inplace(framework, clip_grads_with_norm_, parameters, 5.0, framework.array(5.0))
    assert values(framework, parameters) == [[3.0, 4.0]]
    inplace(framework, clip_grads_with_norm_, parameters, 1.0, 10.0)
    np.testing.assert_allclose(values(framework, parameters)[0], [0.3, 0.4], rtol=4e-7)
    assert np.hypot(*values(framework, parameters)[0]) <= 0.5


def test_jax_arrays_are_replaced():
    p = SimpleNamespace(grad=jnp.array([3.0, 4.0]))
    gradclip.clip_grad_norm_(p, 1.0)
    np.testing.assert_allclose(p.grad, [0.6, 0.8], rtol=2e-7)
