"""Clipped sums of factors, against `per_example_clip` of the same gradients."""

import jax
import numpy as np
import pytest

import gradclip
from factors import PRODUCTS, array, exact, gradient
from gradclip._src.private.ghost.clip import clip_factors
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.tree import flatten

STRUCTURES = {"a": "product", "b": {"c": "tied", "d": "made"}}


def trees(framework, dtype="float32"):
    """Return parameters, gradients in factors, and the same gradients as NumPy arrays."""
    parameters = jax.tree.map(lambda _: array(framework, np.zeros((3, 2)), dtype), STRUCTURES)
    structures = jax.tree.leaves(STRUCTURES)
    factors = [gradient(framework, one, "ordinary", dtype, 5, 2, seed=i) for i, one in enumerate(structures)]
    made = [np.array([[float(x) for x in one] for one in exact(of)]).reshape(5, 3, 2) for of in factors]
    return flatten(parameters), factors, jax.tree.unflatten(jax.tree.structure(STRUCTURES), made)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_norm": 1.0},
        {"max_norm": 1.0, "per_layer": True},
        {"max_norm": 1.0, "per_layer": True, "uniform": False},
        {"max_norm": {"a": 0.5, "b": 2.0}},
        {"max_norm": {"a": 0.5, "b": 2.0}, "to_unit": True},
        {"max_norm": 0.0},
        {"max_norm": np.float32(1.5), "rule": "automatic", "gamma": 0.5},
    ],
)
@pytest.mark.parametrize("mask", [None, [True, True, False, True, False]])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_sums_and_norms_are_those_of_the_gradients(framework, settings, mask):
    parameters, factors, made = trees(framework)
    flags = None if mask is None else array(framework, np.array(mask, float), "float32") > 0
    summed, norms = clip_factors(PRODUCTS[framework], parameters, factors, PerExampleSettings(**settings), flags)
    expected, info = gradclip.per_example_clip(made, mask=mask, **settings)
    for one, other in zip(jax.tree.leaves((summed, norms)), jax.tree.leaves((expected, info.norms)), strict=True):
        assert str(one.dtype).endswith("float32")
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(("dtype", "asked", "expected"), [("float64", None, "float64"), ("bfloat16", None, "float32")])
def test_dtypes_of_sums(dtype, asked, expected):
    parameters, factors, _ = trees("torch", dtype)
    settings = PerExampleSettings(1.0, sum_dtype=asked)
    summed, norms = clip_factors(PRODUCTS["torch"], parameters, factors, settings, None)
    assert {str(x.dtype) for x in (*jax.tree.leaves(summed), norms)} == {f"torch.{expected}"}
