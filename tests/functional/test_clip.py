from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

Pair = namedtuple("Pair", ["first", "second"])


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    weight: object
    bias: object


def test_structure_comes_back(framework):
    tree = {"d": OrderedDict(z=framework.array([3.0]), a=None), "t": (framework.array([[4.0]]), [], Pair(None, {}))}
    clipped, _ = framework.call(lambda t: gradclip.clip_by_global_norm(t, 1.0), tree)
    assert type(clipped["d"]) is OrderedDict
    assert list(clipped["d"]) == ["z", "a"]
    assert clipped["d"]["a"] is None
    assert isinstance(clipped["t"], tuple)
    assert clipped["t"][1:] == ([], Pair(None, {}))
    np.testing.assert_allclose(framework.to_numpy(clipped["t"][0]), [[0.8]], rtol=2e-7)


def test_dataclasses_registered_with_jax():
    layer = Layer(jnp.array([3.0]), jnp.array([4.0]))
    for clip in (gradclip.clip_by_global_norm, jax.jit(gradclip.clip_by_global_norm)):
        clipped, norm = clip(layer, 1.0)
        assert isinstance(clipped, Layer)
        assert float(norm) == 5.0
        np.testing.assert_allclose(clipped.bias, [0.8], rtol=2e-7)
    norms = gradclip.layer_norms(layer)
    assert (float(norms.weight), float(norms.bias)) == (3.0, 4.0)


def test_a_registered_dataclass_of_numpy_arrays():
    clipped, _ = gradclip.clip_by_global_norm(Layer(np.array([3.0]), np.array([4.0])), 1.0)
    assert isinstance(clipped, Layer)
    assert clipped.weight.tolist() == pytest.approx([0.6])


def test_bare_arrays_numbers_and_scalars(framework):
    clipped, norm = framework.call(lambda t: gradclip.clip_by_global_norm(t, 1.0), framework.array(-5.0))
    assert framework.to_numpy(clipped).shape == ()
    assert float(clipped) == pytest.approx(-1.0, rel=2e-7)
    assert float(norm) == 5.0
    clipped, norm = gradclip.clip_by_global_norm([3.0, 4], 1.0)
    assert clipped == [pytest.approx(1.0), 4]


def test_input_is_never_touched_nor_shared(framework):
    x = framework.array([3.0, 4.0])
    for max_norm in (1.0, 10.0):
        clipped, _ = framework.call(lambda t, c=max_norm: gradclip.clip_by_global_norm(t, c), x)
        assert framework.to_numpy(x).tolist() == [3.0, 4.0]
        if not framework.immutable:
            clipped[0] = 7.0
            assert framework.to_numpy(x).tolist() == [3.0, 4.0]


def test_layers_share_the_threshold_of_their_prefix(framework):
    tree = {"a": [framework.array([3.0]), framework.array([4.0])], "b": framework.array([6.0, 8.0])}
    clipped, norms = framework.call(lambda t: gradclip.clip_by_layer_norm(t, {"a": 1.0, "b": 20.0}), tree)
    assert framework.numbers(norms) == {"a": 5.0, "b": 10.0}
    clipped = framework.numbers(clipped)
    assert clipped["b"].tolist() == [6.0, 8.0]
    np.testing.assert_allclose(np.concatenate(clipped["a"]), [0.6, 0.8], rtol=2e-7)


def test_one_threshold_is_that_of_each_leaf(framework):
    tree = {"a": [framework.array([3.0, 4.0])], "b": framework.array([0.6])}
    clipped, norms = framework.call(lambda t: gradclip.clip_by_layer_norm(t, 1.0), tree)
    np.testing.assert_allclose(framework.to_numpy(clipped["a"][0]), [0.6, 0.8], rtol=2e-7)
    assert framework.to_numpy(clipped["b"]).tolist() == np.array([0.6], np.float32).tolist()
    assert framework.to_numpy(norms["a"][0]) == 5.0


@pytest.mark.parametrize(
    "prefix", [{"a": 1.0}, [1.0, 2.0], {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": {"x": 1.0}, "b": 1.0}]
)
def test_thresholds_that_are_no_prefix(framework, prefix):
    tree = {"a": [framework.array([3.0])], "b": framework.array([4.0])}
    with pytest.raises(ValueError, match="prefix of the tree"):
        gradclip.clip_by_layer_norm(tree, prefix)


def test_clip_by_value(framework):
    tree = [framework.array([-3.0, 0.5, 2.0, np.nan]), framework.array(4.0)]
    clipped = framework.call(lambda t: gradclip.clip_by_value(t, 1.0), tree)
    np.testing.assert_array_equal(framework.to_numpy(clipped[0]), [-1.0, 0.5, 1.0, np.nan])
    assert float(clipped[1]) == 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_clip_by_value_never_rounds_the_bound_up(framework, dtype):
    clipped = framework.call(lambda t: gradclip.clip_by_value(t, 0.3), framework.array([5.0, -5.0], dtype))
    largest = framework.to_numpy(clipped).astype(np.float64)
    assert largest[0] == -largest[1]
    assert 0.29 < largest[0] <= 0.3


def test_clip_by_value_of_complex_numbers_is_refused(framework):
    with pytest.raises(TypeError, match=r"\['z'\] is complex and cannot be clipped by value"):
        gradclip.clip_by_value({"z": framework.array([1j], "complex64")}, 1.0)


def test_clip_by_value_has_a_derivative():
    x = torch.tensor([-3.0, 0.5], requires_grad=True)
    gradclip.clip_by_value({"x": x}, 1.0)["x"].sum().backward()
    assert x.grad.tolist() == [0.0, 1.0]
    grad = jax.grad(lambda x: gradclip.clip_by_value(x, 1.0).sum())(jnp.array([-3.0, 0.5]))
    assert grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "leaf", ["text", object(), np.array(["a"]), np.array([1], dtype=object), np.array(["2020"], "datetime64")]
)
def test_leaves_that_are_no_gradients(leaf):
    for function in (gradclip.global_norm, lambda t: gradclip.clip_by_global_norm(t, 1.0)):
        with pytest.raises(TypeError, match=r"must be an array of|cannot be clipped"):
            function({"a": np.ones(2), "b": leaf})


def test_frameworks_are_not_mixed():
    with pytest.raises(TypeError, match="one framework, got numpy and torch"):
        gradclip.global_norm([np.ones(2), torch.ones(2)])
    with pytest.raises(TypeError, match="one framework, got jax and torch"):
        gradclip.global_norm([jnp.ones(2), torch.ones(2)])
    assert float(gradclip.global_norm([jnp.array([3.0]), np.array([4.0], np.float32)])) == 5.0


def test_torch_results_stay_where_they_were():
    x = torch.arange(6.0).reshape(2, 3).t()
    clipped, norm = gradclip.clip_by_global_norm(x, 1.0)
    assert clipped.shape == (3, 2)
    assert norm.device == x.device
    sparse = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 4.0], (3,), check_invariants=True)
    clipped, norm = gradclip.clip_by_global_norm(sparse, 1.0)
    assert float(norm) == 5.0
    assert clipped.is_sparse
    np.testing.assert_allclose(clipped.to_dense(), [0.8, 0.6, 0.0], rtol=2e-7)


def test_float64_does_not_leak_into_the_users_jax_code():
    clip = jax.jit(lambda t: gradclip.clip_by_global_norm(t, 1.0))
    clipped, norm = clip({"a": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16)})
    assert (clipped["a"].dtype, clipped["b"].dtype, norm.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert jnp.arange(3.0).dtype == jnp.float32
    assert not jax.config.jax_enable_x64
    _, total = jax.lax.scan(lambda c, x: (c + clip(x)[1], clip(x)[0]), 0.0, jnp.ones((3, 4)))
    assert total.dtype == jnp.float32
