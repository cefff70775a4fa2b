"""Errors of dtypes that cannot be clipped name the leaf, in every call on trees."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.functional.differentiable import DifferentiableClip

REFUSED = {
    "NumPy, float8": (np.asarray, lambda: np.ones((2, 2), ml_dtypes.float8_e4m3fn)),
    "NumPy, objects": (np.asarray, lambda: np.array([[1.0, None]], object)),
    "NumPy, strings": (np.asarray, lambda: np.array([["a", "b"]])),
    "PyTorch, float8": (torch.tensor, lambda: torch.ones(2, 2).to(torch.float8_e4m3fn)),
    "PyTorch, quantized": (
        torch.tensor,
        lambda: torch._make_per_tensor_quantized_tensor(torch.ones(2, 2, dtype=torch.int8), 0.5, 0),
    ),
    "PyTorch, requires grad": (
        lambda x: torch.tensor(x, requires_grad=True),
        lambda: torch.ones(2, 2).to(torch.float8_e5m2),
    ),
    "JAX, float8": (jnp.asarray, lambda: jnp.ones((2, 2), jnp.float8_e4m3fn)),
    "JAX, keys": (jnp.asarray, lambda: jax.random.split(jax.random.key(0), 4).reshape(2, 2)),
}
CALLS = {
    "clip_by_global_norm": lambda tree, _: gradclip.clip_by_global_norm(tree, 1.0),
    "clip_by_layer_norm": lambda tree, _: gradclip.clip_by_layer_norm(tree, 1.0),
    "clip_by_unit_norm": lambda tree, _: gradclip.clip_by_unit_norm(tree, 1.0),
    "clip_by_unit_norm, columns": lambda tree, _: gradclip.clip_by_unit_norm(tree, 1.0, unit_axis=-1),
    "clip_by_value": lambda tree, _: gradclip.clip_by_value(tree, 1.0),
    "adaptive_grad_clip": lambda tree, fine: gradclip.adaptive_grad_clip(tree, tree | {"b": fine["b"]}),
    "adaptive_grad_clip, the parameters": lambda tree, fine: gradclip.adaptive_grad_clip(fine, tree),
    "norm_at_most": lambda tree, _: gradclip.norm_at_most(tree, 1.0),
    "partial_norm": lambda tree, _: gradclip.partial_norm(tree),
    "partial_norm, clip": lambda tree, fine: gradclip.partial_norm(fine).clip(tree, 1.0),
    "per_example_clip": lambda tree, _: gradclip.per_example_clip(tree, 1.0),
}
IN_PLACE = {
    "clip_grad_unit_norm_": lambda tree, _: gradclip.clip_grad_unit_norm_(tree, 1.0),
    "adaptive_grad_clip_": lambda tree, fine: gradclip.adaptive_grad_clip_(tree, params=fine),
    "adaptive_grad_clip_, the weights": lambda tree, fine: gradclip.adaptive_grad_clip_(fine, params=tree),
}


def trees(kind):
    """Return a tree whose second leaf is refused, and one of the same shapes that is not."""
    make, refused = REFUSED[kind]
    bad = refused()
    fine = {"a": make([[3.0, 4.0]]), "b": make(np.ones(tuple(bad.shape), np.float32))}
    return {"a": make([[3.0, 4.0]]), "b": bad}, fine


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("call", CALLS)
def test_the_leaf_of_a_refused_dtype_is_named(kind, call):
    with pytest.raises(TypeError, match=r"^(the parameter of )?\['b'\](:| has dtype) .*(cannot be clipped)"):
        CALLS[call](*trees(kind))


@pytest.mark.parametrize("call", IN_PLACE)
@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind.startswith("NumPy")])
def test_the_array_of_a_refused_dtype_is_named_and_nothing_is_written(kind, call):
    tree, fine = trees(kind)
    with pytest.raises(TypeError, match=r"^(the parameter of )?\['b'\] has dtype "):
        IN_PLACE[call](tree, fine)
    assert tree["a"].tolist() == fine["a"].tolist() == [[3.0, 4.0]]


def test_the_parameter_of_a_refused_dtype_is_named():
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.ones(2, 2)
    weights = [torch.ones(2, 2), torch.ones(2, 2).to(torch.float8_e4m3fn)]
    with pytest.raises(TypeError, match=r"^the parameter of parameters\[1\]\.grad has dtype float8_e4m3fn"):
        gradclip.adaptive_grad_clip_(parameters, params=weights)
    assert all(bool((parameter.grad == 1).all()) for parameter in parameters)


@pytest.mark.parametrize("call", [CALLS["clip_by_unit_norm"], CALLS["adaptive_grad_clip"]])
def test_the_leaf_is_named_while_traced(call):
    tree = {"a": jnp.ones((1, 2)), "b": jnp.ones((2, 2), jnp.float8_e4m3fn)}
    with pytest.raises(TypeError, match=r"^\['b'\] has dtype float8"):
        jax.jit(lambda tree: call(tree, {"a": jnp.ones((1, 2)), "b": jnp.ones((2, 2))}))(tree)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_no_units(layout):
    tree = {"a": torch.ones(2), "b": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=layout)}
    with pytest.raises(TypeError, match=r"got a nested tensor at \['b'\]\. Call \.to_padded_tensor\(0\.0\) on it"):
        gradclip.clip_by_unit_norm(tree, 1.0)
    with pytest.raises(TypeError, match=r"\['b'\]: a nested tensor cannot be clipped\. Pass .* its parts, x\.unbind"):
        gradclip.partial_norm(tree)


@pytest.mark.parametrize("call", [CALLS["clip_by_global_norm"], CALLS["adaptive_grad_clip"]])
def test_a_type_error_that_no_leaf_explains_stays_as_it_is(call, monkeypatch):
    def refuse(*_, **__):
        raise TypeError("the compiler is lost")

    monkeypatch.setattr(DifferentiableClip, "run", refuse)
    tree = {"a": jnp.ones((1, 2)), "b": jnp.ones((2, 2))}
    with pytest.raises(TypeError, match=r"^the compiler is lost"):
        jax.jit(lambda tree: call(tree, tree))(tree)


def test_a_bare_gradient_is_named_as_such():
    for call in (gradclip.partial_norm, lambda x: gradclip.clip_by_unit_norm(x, 1.0)):
        with pytest.raises(TypeError, match=r"^the gradient has dtype object"):
            call(np.array([1.0, None], object))
