"""Clipping by a norm that is given: what is taken for one, and that a mistake changes nothing."""

import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from frameworks import ALL, by_name
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip.integrations.torch import clip_grads_with_norm_ as clip_grads_with_norm_of_torch

NO_NORMS = ("1", True, None, 1j, [1.0], (), Decimal(5), np.bool_(True), np.array([5.0]), np.array(5j), {"a": 1.0})
NEGATIVE = (-5.0, -1, -math.inf, np.float32(-1e-30), np.array(-2), -(10**400), Fraction(-1, 3))


def no_scalars(framework):
    """Arrays of a framework that are no norm."""
    return [framework.from_numpy(np.array(x)) for x in (True, 5j, [5.0], [[5.0]], [])]


@pytest.fixture
def holder(framework):
    made = SimpleNamespace(grad=framework.array([3.0, 4.0]))
    grad = made.grad
    yield made
    assert made.grad is grad
    assert framework.to_numpy(grad).tolist() == [3.0, 4.0]


def test_what_is_no_number_is_refused(framework, holder):
    with framework.mode():
        for norm in (*NO_NORMS, *no_scalars(framework)):
            with pytest.raises(TypeError, match="total_norm must be a real number or a scalar array of real dtype"):
                clip_grads_with_norm_([holder], 1.0, norm)


def test_negative_and_huge_numbers_are_refused(framework, holder):
    with framework.mode():
        for norm in (*NEGATIVE, 10**400):
            with pytest.raises(ValueError, match="total_norm must be non-negative and within float64's range, got"):
                clip_grads_with_norm_([holder], 1.0, norm)


@pytest.mark.parametrize("framework", [f for f in ALL if f.name in ("numpy", "torch", "jax")], ids=by_name)
def test_negative_arrays_are_refused_where_they_can_be_looked_at(framework, holder):
    for norm in (framework.array(-5.0), framework.array(-5.0, "float16"), framework.array(-math.inf)):
        with pytest.raises(ValueError, match="must be non-negative and within float64's range, got"):
            clip_grads_with_norm_([holder], 1.0, norm)


@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("framework", [f for f in ALL if f.name == "torch-device"], ids=by_name)
def test_negative_arrays_of_a_device_make_all_nan(framework, max_norm):
    holder = SimpleNamespace(grad=framework.array([3.0, 4.0]))
    with framework.mode():
        clip_grads_with_norm_([holder], max_norm, framework.array(-5.0))
    assert np.isnan(framework.to_numpy(holder.grad)).all()


@pytest.mark.parametrize("norm", [10, 10.0, np.float16(10), np.array(10), np.array(10.0), Fraction(10)], ids=repr)
def test_numbers_of_all_kinds_are_norms(framework, norm):
    holder = SimpleNamespace(grad=framework.array([3.0, 4.0]))
    with framework.mode():
        clip_grads_with_norm_([holder], 1.0, norm)
    np.testing.assert_allclose(framework.to_numpy(holder.grad), [0.3, 0.4], rtol=4e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_scalar_arrays_are_norms(framework, dtype):
    holder = SimpleNamespace(grad=framework.array([3.0, 4.0]))
    with framework.mode():
        clip_grads_with_norm_([holder], 1.0, framework.array(10, dtype))
    np.testing.assert_allclose(framework.to_numpy(holder.grad), [0.3, 0.4], rtol=4e-7)


@pytest.mark.parametrize(("norm", "expected"), [(math.nan, [math.nan] * 2), (math.inf, [0.0, 0.0]), (0, [3.0, 4.0])])
def test_norms_that_are_not_finite_or_zero(framework, norm, expected):
    for given in (norm, framework.array(norm)):
        holder = SimpleNamespace(grad=framework.array([3.0, 4.0]))
        with framework.mode():
            clip_grads_with_norm_([holder], 1.0, given)
        np.testing.assert_array_equal(framework.to_numpy(holder.grad), expected)


@pytest.mark.after_error
@pytest.mark.parametrize("norm", [-5.0, torch.tensor(-5.0), "1", True, 1j, torch.tensor([5.0]), jnp.ones(2)], ids=repr)
def test_the_name_of_torch_refuses_them_too(norm):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises((TypeError, ValueError), match="total_norm must"):
        clip_grads_with_norm_of_torch(parameter, 1.0, norm)
    assert parameter.grad.tolist() == [3.0, 4.0]
    assert parameter.grad._version == 0
