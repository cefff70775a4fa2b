"""The names of `lucid.nn.util` over plain objects whose gradients are NumPy arrays, torch tensors or JAX arrays."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradclip.integrations.lucid import clip_grad_norm, clip_grad_value, grad_norm
from parity_support import REQUIRED, arguments, assert_just_below, assert_matches, tolerance

MAKERS = {"numpy": np.float32, "torch": torch.tensor, "jax": jnp.array}
every_framework = pytest.mark.parametrize("array", MAKERS.values(), ids=MAKERS)


def holder(grad):
    return SimpleNamespace(grad=grad)


def numpy_pair(dtype=np.float64):
    return [holder(np.array([3.0], dtype)), holder(None), holder(np.array([[4.0]], dtype))]


def grads(parameters):
    return [np.asarray(p.grad).item() for p in parameters if p.grad is not None]


def close(actual, expected, dtype):
    assert_matches(actual, expected, tolerance(dtype, 2), dtype)
    return True


def test_signatures():
    assert arguments(grad_norm) == [("parameters", REQUIRED), ("norm_type", 2)]
    assert arguments(clip_grad_norm) == [
        ("parameters", REQUIRED),
        ("max_norm", REQUIRED),
        ("norm_type", 2),
        ("eps", 1e-7),
    ]
    assert arguments(clip_grad_value) == [("parameters", REQUIRED), ("clip_value", REQUIRED)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_divides_by_the_norm_plus_eps(dtype):
    ps = numpy_pair(dtype)
    arrays = [p.grad for p in ps]
    norm = clip_grad_norm(ps, 1.0, eps=1.0)
    assert float(norm) == 5.0
    assert close(grads(ps), [3 / 6, 4 / 6], np.dtype(dtype).name)
    assert [p.grad for p in ps] == arrays
    assert ps[0].grad.dtype == dtype


def test_default_eps():
    ps = numpy_pair()
    clip_grad_norm(ps, 1.0)
    assert close(grads(ps), [3 / (5 + 1e-7), 4 / (5 + 1e-7)], "float64")


@pytest.mark.parametrize("eps", [0, 0.0, 0.5, np.float32(0.5), np.float64(0.5)], ids=repr)
def test_any_number_is_an_eps(eps):
    ps = numpy_pair()
    clip_grad_norm(ps, 1.0, eps=eps)
    assert close(grads(ps), [3 / (5 + float(eps)), 4 / (5 + float(eps))], "float64")


@pytest.mark.after_error
@pytest.mark.parametrize("eps", [-1.0, math.nan, None, "1"], ids=repr)
def test_anything_else_is_none(eps):
    ps = numpy_pair()
    with pytest.raises(ValueError, match="eps must be a number >= 0"):
        clip_grad_norm(ps, 1.0, eps=eps)
    assert grads(ps) == [3.0, 4.0]


@every_framework
def test_gradients_of_each_framework(array):
    ps = [holder(array([3.0, 4.0])), holder(array([0.0]))]
    norm = clip_grad_norm(ps, 1.0, eps=1.0)
    assert type(norm) in (np.float32, torch.Tensor, type(jnp.zeros(())))
    assert float(norm) == 5.0
    assert type(ps[0].grad) is type(array([3.0, 4.0]))
    assert close(ps[0].grad, [3 / 6, 4 / 6], "float32")
    assert str(ps[0].grad.dtype).endswith("float32")


def test_torch_parameters_are_clipped_where_they_lie():
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = grad = torch.tensor([3.0, 4.0])
    norm = clip_grad_norm(one, 1.0, eps=1.0)
    assert one.grad is grad
    assert isinstance(norm, torch.Tensor)
    assert close(grad, [3 / 6, 4 / 6], "float32")


@pytest.mark.parametrize("max_norm", [5.0, 5.5, math.inf])
def test_nothing_changes_where_the_norm_is_small_enough(max_norm):
    ps = numpy_pair()
    for p in ps[::2]:
        p.grad.setflags(write=False)
    before = [p.grad for p in ps]
    assert float(clip_grad_norm(ps, max_norm, eps=1.0)) == 5.0
    assert all(p.grad is grad for p, grad in zip(ps, before, strict=True))


@pytest.mark.parametrize(
    ("norm_type", "norm"), [(1, 7.0), (2, 5.0), (3, 91 ** (1 / 3)), ("inf", 4.0), (math.inf, 4.0), ("-inf", 3.0)]
)
def test_orders(norm_type, norm):
    ps = numpy_pair(np.float32)
    assert float(grad_norm(ps, norm_type)) == pytest.approx(norm, rel=2.0**-23)
    assert float(clip_grad_norm(ps, 1.0, norm_type, eps=1.0)) == pytest.approx(norm, rel=2.0**-23)
    assert close(grads(ps), [3 / (norm + 1), 4 / (norm + 1)], "float32")


@pytest.mark.after_error
@pytest.mark.parametrize("norm_type", [0, 0.5, -1, "fro"], ids=repr)
def test_unknown_orders(norm_type):
    ps = numpy_pair()
    for call in (lambda: clip_grad_norm(ps, 1.0, norm_type), lambda: grad_norm(ps, norm_type)):
        with pytest.raises(ValueError, match="norm_type must be a number >= 1"):
            call()
    assert grads(ps) == [3.0, 4.0]


@every_framework
def test_grad_norm_changes_nothing(array):
    ps = [holder(array([3.0, 4.0])), holder(array([12.0])), holder(None)]
    assert float(grad_norm(ps)) == 13.0
    assert ps[0].grad.tolist() == [3.0, 4.0]
    assert float(grad_norm(ps[0])) == 5.0


@pytest.mark.parametrize("ps", [[], [holder(None)], holder(None)], ids=["nothing", "none", "one without"])
def test_nothing_to_clip(ps):
    with pytest.warns(UserWarning, match="no parameter has a gradient") if ps else nullcontext():
        assert float(grad_norm(ps)) == 0.0
    with pytest.warns(UserWarning, match="no parameter has a gradient") if ps else nullcontext():
        assert float(clip_grad_norm(ps, 1.0)) == 0.0
    with pytest.warns(UserWarning, match="no parameter has a gradient") if ps else nullcontext():
        assert clip_grad_value(ps, 1.0) is None


def test_takes_a_generator_and_refuses_an_exhausted_one():
    ps = numpy_pair()
    generator = (p for p in ps)
    assert float(clip_grad_norm(generator, 2.5, eps=0.0)) == 5.0
    assert_just_below(grads(ps), [1.5, 2.0], "float64")
    for call in (
        lambda: clip_grad_norm(generator, 1.0),
        lambda: grad_norm(generator),
        lambda: clip_grad_value(generator, 1),
    ):
        with pytest.raises(ValueError, match="a generator that yields nothing"):
            call()


@pytest.mark.after_error
@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -math.inf])
def test_negative_and_nan_thresholds(max_norm):
    ps = numpy_pair()
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        clip_grad_norm(ps, max_norm)
    with pytest.raises(ValueError, match="clip_value must not be negative or NaN"):
        clip_grad_value(ps, max_norm)
    assert grads(ps) == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_seen_everywhere(bad):
    ps = [holder(np.array([bad, 1.0])), holder(np.array([2.0]))]
    norm = clip_grad_norm(ps, 1.0)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert all(np.isnan(p.grad).all() for p in ps)


def test_finite_gradients_never_overflow():
    one = holder(np.array([3.0, 4.0]) * 2.0**1000)
    assert float(clip_grad_norm(one, 1.0)) == pytest.approx(5 * 2.0**1000, rel=1e-14)
    assert close(one.grad, [0.6, 0.8], "float64")


@pytest.mark.parametrize(
    "passed",
    [np.array([3.0, 4.0]), [np.array([3.0, 4.0])], [object()], 3, {"w": holder(None)}],
    ids=["array", "arrays", "objects", "number", "dict"],
)
def test_things_without_a_gradient(passed):
    for call in (lambda: clip_grad_norm(passed, 1.0), lambda: grad_norm(passed), lambda: clip_grad_value(passed, 1.0)):
        with pytest.raises(TypeError, match=r"\.grad"):
            call()


@pytest.mark.after_error
def test_integer_gradients():
    one = holder(np.array([3, 4]))
    with pytest.raises(TypeError, match=r"parameters\[0\]\.grad has dtype int64"):
        clip_grad_norm(one, 1.0)
    assert one.grad.tolist() == [3, 4]


@pytest.mark.after_error
def test_gradients_of_two_frameworks():
    ps = [holder(np.array([3.0])), holder(torch.tensor([4.0]))]
    with pytest.raises(TypeError, match="arrays of one framework, got numpy and torch"):
        clip_grad_norm(ps, 1.0)
    assert grads(ps) == [3.0, 4.0]


@every_framework
def test_values(array):
    one = holder(array([3.0, -4.0, 0.5, math.nan, math.inf]))
    assert clip_grad_value([one, holder(None)], 1.0) is None
    assert str(one.grad.tolist()) == "[1.0, -1.0, 0.5, nan, 1.0]"


def test_jax_gradients_are_replaced():
    one = holder(jnp.array([3.0, 4.0]))
    before = one.grad
    clip_grad_norm(one, 1.0)
    assert isinstance(one.grad, jax.Array)
    assert before.tolist() == [3.0, 4.0]
