"""Arrays and tensors that cannot be clipped: the error says which, and what to pass instead."""

import warnings
from collections import UserDict
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

MASKED = np.ma.array([3.0, 4.0], mask=[False, True])


@pytest.mark.after_error
@pytest.mark.parametrize(
    "call",
    [
        gradclip.global_norm,
        gradclip.layer_norms,
        gradclip.partial_norm,
        lambda x: gradclip.clip_by_global_norm(x, 1.0),
        lambda x: gradclip.clip_by_layer_norm(x, 1.0),
        lambda x: gradclip.clip_by_value(x, 1.0),
        lambda x: gradclip.per_example_clip(x, 1.0),
        lambda x: gradclip.norm_at_most(x, 1.0),
        lambda x: gradclip.clip_grad_norm_(x, 1.0),
        lambda x: gradclip.clip_grad_norm_({"w": np.ones(2), "x": x}, 1.0),
        lambda x: gradclip.clip_grad_norm_(SimpleNamespace(grad=x), 1.0),
        lambda x: gradclip.clip_grad_value_(SimpleNamespace(grad=x), 1.0),
    ],
)
def test_masked_arrays_do_not_lose_their_mask(call):
    before = MASKED.copy()
    with pytest.raises(TypeError, match=r"is a masked array, and clipping would lose the mask\. Pass x\.filled\(0\)"):
        call(MASKED)
    assert MASKED.data.tolist() == before.data.tolist()


def tensors_of_other_kinds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"
        yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "unbind"
        yield "mkldnn", torch.ones(2, 3).to_mkldnn(), "to_dense"
        yield "quantized|quint8", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "dequantize|Convert"


@pytest.mark.parametrize(("kind", "tensor", "instead"), list(tensors_of_other_kinds()))
def test_tensors_that_cannot_be_clipped_say_what_can(kind, tensor, instead):
    holder = SimpleNamespace(grad=tensor)
    for call in (
        lambda: gradclip.global_norm(tensor),
        lambda: gradclip.partial_norm(tensor),
        lambda: gradclip.clip_by_global_norm({"x": tensor}, 1.0),
        lambda: gradclip.clip_by_value(tensor, 1.0),
        lambda: gradclip.per_example_clip(tensor, 1.0),
        lambda: gradclip.clip_grad_norm_([holder], 1.0),
        lambda: gradclip.clip_grad_value_([holder], 1.0),
        lambda: gradclip.grad_norm([holder]),
    ):
        with pytest.raises(TypeError, match=f"({kind}).*({instead})"):
            call()


class Frame:
    """What is no array, but becomes one, as a table of pandas."""

    def to_numpy(self):
        return np.ones(2)

    def __repr__(self):
        return "a\n0  3.0"


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (torch.nn.Linear(2, 1), "of type Linear .* For a module, pass the gradients"),
        (UserDict(w=np.ones(2)), r"of type UserDict .* Convert it with dict\(...\)"),
        ({1.0, 2.0}, r"of type set .* Convert it with list\(...\)"),
        (Frame(), r"of type Frame .* Pass the result of its to_numpy\(\)"),
    ],
)
def test_what_is_no_array_is_named_with_what_to_pass(leaf, advice):
    for call in (gradclip.global_norm, gradclip.partial_norm, lambda tree: gradclip.clip_by_value(tree, 1.0)):
        with pytest.raises(
            TypeError, match=f"must be an array of NumPy, PyTorch, JAX, TensorFlow or MLX, got .*{advice}"
        ):
            call({"x": leaf})


def test_generators_are_named_with_what_to_pass():
    with pytest.raises(TypeError, match=r"of type generator at the root. Convert it with list\(...\)\. If it yields p"):
        gradclip.global_norm(x for x in [jnp.ones(2)])
