"""Thresholds, orders and masks: what is none of these is refused by all that take one."""

import math
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.passed.arguments import check_mask, check_threshold

TREE = {"w": np.array([3.0, 4.0])}
CALLS = {
    "global": lambda c: gradclip.clip_by_global_norm(TREE, c),
    "layer": lambda c: gradclip.clip_by_layer_norm(TREE, {"w": c}),
    "value": lambda c: gradclip.clip_by_value(TREE, c),
    "example": lambda c: gradclip.per_example_clip(TREE["w"], c),
    "in place": lambda c: gradclip.clip_grad_norm_(SimpleNamespace(grad=TREE["w"]), c),
    "value in place": lambda c: gradclip.clip_grad_value_(SimpleNamespace(grad=TREE["w"]), c),
    "layers in place": lambda c: gradclip.clip_grad_layer_norm_(SimpleNamespace(grad=TREE["w"]), c),
    "partial": lambda c: gradclip.partial_norm(TREE).clip(TREE, c),
    "sensitivity": lambda c: gradclip.clipped_sum_sensitivity(c),
    "at most": lambda c: gradclip.norm_at_most(TREE, c),
}
NO_NUMBERS = [
    True,
    np.True_,
    1j,
    np.complex64(1),
    "1",
    np.str_("1"),
    b"1",
    np.array(True),
    np.array(1j),
    np.array("1"),
    np.array(None),
    np.ma.array(1.0, mask=True),
    np.ma.masked,
    torch.tensor(True),
    torch.tensor(1j),
    jnp.array(True),
    jnp.array(1j),
]


@pytest.fixture(autouse=True)
def unchanged():
    yield
    assert TREE["w"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_threshold_that_is_no_real_number_is_a_type_error(call, bad):
    with pytest.raises(TypeError):
        call(bad)


@pytest.mark.parametrize("huge", [10**400, Fraction(10) ** 400, -(10**400)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_threshold_beyond_float64_is_a_value_error(call, huge):
    with pytest.raises(ValueError, match=r"max_norm|max_value|clip_value"):
        call(huge)


def test_an_order_beyond_float64_is_a_value_error():
    with pytest.raises(ValueError, match="ord must be"):
        gradclip.global_norm(TREE, 10**400)


@pytest.mark.parametrize("number", [Fraction(1, 3), Fraction(2, 3), 2**53 + 1, 2**53 + 3, np.int64(2**53 + 3)])
def test_a_threshold_is_never_rounded_up(number):
    exact = Fraction(int(number)) if isinstance(number, np.integer) else Fraction(number)
    assert 0 <= exact - Fraction(check_threshold(number)) < exact * Fraction(1, 2**52)


def test_a_traced_threshold_must_be_real():
    with pytest.raises(TypeError, match="max_norm must be a real number"):
        jax.jit(lambda c: gradclip.clip_by_global_norm(jnp.ones(3), c))(True)


NO_MASKS = [
    "abc",
    b"abc",
    5,
    1.0,
    [0.5, 0.0, math.nan],
    [2, 0, 5],
    {True, False},
    {0: True},
    np.array([1, 0, 1]),
    np.array([1.0, 0.0, 1.0]),
    np.ma.array([True, False, True], mask=[0, 0, 1]),
    torch.tensor([1, 0, 1]),
    jnp.array([1.0, 0.0, 1.0]),
    [True, "x", False],
]


@pytest.mark.parametrize("bad", NO_MASKS, ids=repr)
def test_a_mask_must_hold_booleans(bad):
    with pytest.raises(TypeError, match="mask must hold one boolean"):
        gradclip.per_example_clip(np.ones((3, 2)), 1.0, mask=bad)
    clipped = gradclip.clipped_grad(lambda w, x: (w @ x).sum(), 1.0)
    for w in (torch.ones(2), jnp.ones(2)):
        examples = torch.ones(3, 2) if isinstance(w, torch.Tensor) else jnp.ones((3, 2))
        with pytest.raises(TypeError, match="mask must hold one boolean"):
            clipped(w, examples, mask=bad)


def test_masks_of_booleans_are_masks():
    for mask in ([True, False], (np.True_, False), np.array([True, False]), torch.tensor([True, False])):
        assert check_mask(mask) is mask
    assert gradclip.per_example_clip(np.ones((2, 1)), 9.0, mask=[True, False])[0].tolist() == [1.0]


BAD_VALUES = [-1.0, -math.inf, math.nan, np.float32(-1), np.array(-1.0), -1]
BAD_TYPES = ["1", None, True, [1.0, 2.0], object(), jax.ShapeDtypeStruct((), np.float32)]


@pytest.mark.parametrize("bad", BAD_VALUES)
def test_negative_or_nan_threshold_is_a_value_error(framework, bad):
    x = framework.array([3.0, 4.0])
    for function in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm, gradclip.clip_by_value):
        with pytest.raises(ValueError, match=r"must not be negative or NaN, got .*math\.inf"):
            function(x, bad)


@pytest.mark.parametrize("bad", BAD_TYPES)
def test_a_threshold_that_is_no_number_is_a_type_error(framework, bad):
    x = framework.array([3.0, 4.0])
    for function in (gradclip.clip_by_global_norm, gradclip.clip_by_value):
        with pytest.raises(TypeError, match="must be a real number or a scalar array"):
            function(x, bad)


def test_known_negative_arrays_are_refused_too():
    with pytest.raises(ValueError, match="must not be negative"):
        gradclip.clip_by_global_norm(torch.ones(2), torch.tensor(-1.0))
    with pytest.raises(ValueError, match="must not be negative"):
        gradclip.clip_by_global_norm(jnp.ones(2), jnp.array(-1.0))
