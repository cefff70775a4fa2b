"""Objects whose `.grad` is a property: it may hand out another object at each read, or another view of one memory."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.inplace.norm import clip_grads_with_norm_


class Holder:
    """Hands out a new object at each read, made of what it holds, and takes arrays for it."""

    def __init__(self, values, hand_out):
        self.values = values
        self.hand_out = hand_out

    @property
    def grad(self):
        return self.hand_out(self.values)

    @grad.setter
    def grad(self, new):
        self.values = np.asarray(new)


def read_only_view(values):
    view = values.view()
    view.flags.writeable = False
    return view


HAND_OUT = {
    "read-only view": read_only_view,
    "view": lambda values: values.view(),
    "expanded": lambda values: np.broadcast_to(values, values.shape),
    "jax": jnp.asarray,
    "torch": lambda values: torch.from_numpy(values),
    "torch conjugate": lambda values: torch.from_numpy(values).conj(),
}
every_kind = pytest.mark.parametrize("hand_out", HAND_OUT.values(), ids=HAND_OUT)
CALLS = {
    "norm": (lambda ps: gradclip.clip_grad_norm_(ps, 6.5), [1.5, 2.0, 6.0]),
    "norm, raise": (lambda ps: gradclip.clip_grad_norm_(ps, 6.5, nonfinite="raise"), [1.5, 2.0, 6.0]),
    "with norm": (lambda ps: clip_grads_with_norm_(ps, 6.5, 13.0), [1.5, 2.0, 6.0]),
    "nothing": (lambda ps: gradclip.clip_grad_norm_(ps, 13.0), [3.0, 4.0, 12.0]),
}
every_call = pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)


def holders(hand_out, *values):
    dtype = np.complex64 if hand_out is HAND_OUT["torch conjugate"] else np.float32
    return [Holder(np.array(each, dtype), hand_out) for each in values]


def values(parameters):
    return [float(np.real(x)) for p in parameters for x in p.values]


@every_call
@every_kind
def test_what_a_property_hands_out_is_clipped(hand_out, call, expected):
    parameters = holders(hand_out, [3.0, 4.0], [12.0])
    call(parameters)
    np.testing.assert_allclose(values(parameters), expected, rtol=4e-7)


@pytest.mark.parametrize("hand_out", [HAND_OUT[kind] for kind in ("read-only view", "view", "jax", "torch")])
def test_values_are_clamped(hand_out):
    parameters = holders(hand_out, [3.0, -4.0], [0.5])
    gradclip.clip_grad_value_(parameters, 1.0)
    assert values(parameters) == [1.0, -1.0, 0.5]


@every_kind
def test_a_holder_listed_twice_counts_once(hand_out):
    first, second = holders(hand_out, [3.0, 4.0], [12.0])
    assert float(gradclip.clip_grad_norm_([first, second, first], 6.5)) == 13.0
    np.testing.assert_allclose(values([first, second]), [1.5, 2.0, 6.0], rtol=4e-7)


@pytest.mark.after_error
@every_kind
def test_errors_name_the_holder(hand_out):
    parameters = holders(hand_out, [3.0, 4.0], [np.nan], [np.inf, 1.0])
    with pytest.raises(
        FloatingPointError, match=r"parameters\[1\]\.grad: 1 NaN.*; parameters\[2\]\.grad: 0 NaN, 1 inf"
    ):
        gradclip.clip_grad_norm_(parameters, 1.0, nonfinite="raise")
    np.testing.assert_array_equal(values(parameters), [3.0, 4.0, np.nan, np.inf, 1.0])
