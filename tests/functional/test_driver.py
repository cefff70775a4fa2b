"""Many layers at once: each comes out as it does alone, with a bound that holds exactly, and with few calls."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, DTYPES, by_name, numpy_dtype
from rational import at_most, random_leaf

HOST = [framework for framework in ALL if not framework.traced]
in_host_memory = pytest.mark.parametrize("framework", HOST, ids=by_name)


def leaves_of_all_kinds(rng, dtypes):
    """Return dense, strided and empty leaves, zeros, and some at all magnitudes."""
    leaves = [random_leaf(rng, str(rng.choice(dtypes)), int(rng.integers(1, 12))) for _ in range(12)]
    leaves = [leaf for leaf in leaves if np.isfinite(leaf.astype(complex)).all()]
    strided = [leaf.repeat(2)[::2] for leaf in leaves[:3]]
    zeros = [np.zeros(n, numpy_dtype(dtype)) for n, dtype in ((0, dtypes[0]), (3, dtypes[0]), (2, dtypes[-1]))]
    fortran = np.asfortranarray(rng.normal(size=(3, 4)).astype(numpy_dtype(dtypes[0])))
    return [*leaves, *strided, *zeros, fortran, leaves[0].reshape(-1, 1), np.asarray(leaves[1][0])]


@in_host_memory
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_each_layer_as_it_is_alone(framework, ord):
    rng = np.random.default_rng([len(framework.name), int(min(ord, 9))])
    dtypes = [dtype for dtype in framework.dtypes if ord == 2 or "complex" not in dtype]
    with framework.mode():
        for max_norm in (1.0, 0.0, 1e-30, math.inf):
            leaves = leaves_of_all_kinds(rng, dtypes)
            given = [framework.from_numpy(leaf) for leaf in leaves]
            clipped, norms = gradclip.clip_by_layer_norm(given, max_norm, ord=ord)
            measured = gradclip.layer_norms(given, ord)
            for leaf, x, y, norm, again in zip(leaves, given, clipped, norms, measured, strict=True):
                alone, norm_alone = gradclip.clip_by_global_norm(x, max_norm, ord=ord)
                found, expected = framework.to_numpy(y), framework.to_numpy(alone)
                assert (found.dtype, found.shape, type(y)) == (leaf.dtype, leaf.shape, type(alone))
                step = float(ml_dtypes.finfo(leaf.dtype).tiny) * 2.0**-6
                np.testing.assert_allclose(found.astype(complex), expected.astype(complex), rtol=2.0**-6, atol=step)
                assert (norm.dtype, type(norm)) == (norm_alone.dtype, type(norm_alone))
                np.testing.assert_allclose(float(norm), float(norm_alone), rtol=1e-7)
                assert float(again) == float(norm)
                if math.isfinite(max_norm) and leaf.size:
                    assert at_most([found], ord, max_norm)
                    if at_most([leaf], ord, max_norm):
                        assert found.tobytes() == leaf.tobytes()


@in_host_memory
def test_prefixes(framework):
    with framework.mode():
        dtype = framework.dtypes[0]
        tree = {
            "a": [framework.array([3.0], dtype), framework.array([4.0], dtype)],
            "b": {"x": framework.array([0.25, 0.25], dtype)},
            "c": framework.array([np.nan], dtype),
        }
        clipped, norms = gradclip.clip_by_layer_norm(tree, {"a": 1, "b": 10.0, "c": 1.0}, nonfinite="drop")
        assert [float(norms[key]) for key in "ab"] == pytest.approx([5.0, 0.125**0.5], rel=1e-6)
        numbers = framework.numbers(clipped)
        np.testing.assert_allclose(np.asarray(numbers["a"], float), [[0.6], [0.8]], rtol=1e-2)
        assert numbers["b"]["x"].tolist() == [0.25, 0.25]
        assert numbers["c"].tolist() == [0.0]


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_ties_are_left_alone(dtype):
    rng = np.random.default_rng(0)
    tree = [rng.choice([-1, 1], size=k * k).astype(numpy_dtype(dtype)) for k in range(1, 30)]
    clipped, norms = gradclip.clip_by_layer_norm(tree, [float(k) for k in range(1, 30)])
    assert all(x.tobytes() == y.tobytes() for x, y in zip(tree, clipped, strict=True))
    assert list(map(float, norms)) == [float(k) for k in range(1, 30)]


def test_what_is_not_finite_in_one_of_many_layers():
    tree = {f"layer{i}": np.array([3.0, 4.0]) for i in range(20)}
    tree["layer7"] = np.array([np.inf, 1.0])
    clipped, norms = gradclip.clip_by_layer_norm(tree, 1.0)
    assert np.isnan(clipped["layer7"]).all()
    assert math.isinf(norms["layer7"])
    assert all(np.allclose(y, [0.6, 0.8]) for key, y in clipped.items() if key != "layer7")
    with pytest.raises(FloatingPointError, match=r"\['layer7'\]: 0 NaN, 1 infinite of 2"):
        gradclip.clip_by_layer_norm(tree, 1.0, nonfinite="raise")
    zeroed, _ = gradclip.clip_by_layer_norm(tree, 1.0, nonfinite="zero")
    assert zeroed["layer7"].tolist() == [0.0, 1.0]


def test_layers_that_are_differentiated():
    tree = [torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True) for _ in range(3)]
    clipped, _ = gradclip.clip_by_layer_norm(tree, 1.0)
    gradient = torch.autograd.grad(sum(y[0] for y in clipped), tree)
    for x in gradient:
        torch.testing.assert_close(x, torch.tensor([0.128, -0.096], dtype=torch.float64))
