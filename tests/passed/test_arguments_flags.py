"""Flags are booleans, in every call that takes some."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip.integrations import jax_privacy
from gradclip.integrations import torch as named_as_torch

ROWS = {"w": np.array([[3.0, 4.0], [0.3, 0.4]])}


def loss(w, x):
    return (w * x).sum()


def holder():
    return SimpleNamespace(grad=torch.tensor([3.0, 4.0]))


MADE = {
    "per_example_clip": (
        lambda **flags: gradclip.per_example_clip(ROWS, 1.0, **flags),
        ["per_layer", "uniform", "to_unit"],
    ),
    "sensitivity": (lambda **flags: gradclip.clipped_sum_sensitivity(1.0, **flags), ["per_layer", "to_unit"]),
    "clipped_grad": (
        lambda **flags: gradclip.clipped_grad(loss, 1.0, **flags),
        ["per_layer", "uniform", "has_aux", "keep_batch_dim", "return_values", "return_norms"],
    ),
    "clipped_fun": (
        lambda **flags: gradclip.clipped_fun(lambda x: x, 1.0, **flags),
        ["per_layer", "uniform", "has_aux", "keep_batch_dim", "return_norms"],
    ),
    "torch.clip_grad_norm_": (
        lambda **flags: named_as_torch.clip_grad_norm_([holder()], 1.0, **flags),
        ["error_if_nonfinite"],
    ),
    "torch.get_total_norm": (
        lambda **flags: named_as_torch.get_total_norm([torch.ones(2)], **flags),
        ["error_if_nonfinite"],
    ),
    "jax_privacy.clip_pytree": (
        lambda **flags: jax_privacy.clip_pytree([jnp.ones(3)], 1.0, **flags),
        ["rescale_to_unit_norm", "nan_safe", "return_zero"],
    ),
    "jax_privacy.clipped_fun": (
        lambda **flags: jax_privacy.clipped_fun(jnp.mean, **flags),
        ["has_aux", "keep_batch_dim", "rescale_to_unit_norm", "return_norms", "nan_safe"],
    ),
    "jax_privacy.clipped_grad": (
        lambda **flags: jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, **flags),
        ["has_aux", "keep_batch_dim", "rescale_to_unit_norm", "return_grad_norms", "return_values", "nan_safe"],
    ),
}


@pytest.mark.parametrize(("call", "flag"), [(name, flag) for name, (_, flags) in MADE.items() for flag in flags])
def test_flags_are_booleans(call, flag):
    make = MADE[call][0]
    for wrong in ("yes", "False", 1, 0, 1.0, None, [], np.array([True, False])):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got "):
            make(**{flag: wrong})
    make(**{flag: np.False_})
