"""Side by side with `declearn.optimizer.modules`: the same Vectors through both modules, of each framework."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from declearn.model.haiku import JaxNumpyVector
from declearn.model.sklearn import NumpyVector
from declearn.model.tensorflow import TensorflowVector
from declearn.model.torch import TorchVector
from declearn.optimizer import modules as peer
from declearn.utils import set_device_policy

from gradclip.integrations import declearn as ours
from parity_support import (
    ULP,
    arguments,
    assert_matches,
    count_of,
    gradients,
    plain_sum_ulps,
    reference_clip,
    tolerance,
)

# The import of declearn's JAX vectors switches 64-bit mode on for the whole process.
jax.config.update("jax_enable_x64", False)

NAMES = ("L2Clipping", "L2GlobalClipping")
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


VECTORS = {
    "numpy": lambda leaves: NumpyVector(leaves),
    "torch": lambda leaves: TorchVector({name: tensor(leaf) for name, leaf in leaves.items()}),
    "jax": lambda leaves: JaxNumpyVector({name: jnp.asarray(leaf) for name, leaf in leaves.items()}),
    "tensorflow": lambda leaves: TensorflowVector({name: tf.constant(leaf) for name, leaf in leaves.items()}),
}
CASES = [
    *(("numpy", dtype) for dtype in ("float16", "float32", "float64")),
    *(("torch", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")),
    *(("jax", dtype) for dtype in ("float16", "bfloat16", "float32")),
    *(("tensorflow", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")),
]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    set_device_policy(gpu=False)


def numbers(vector, like):
    """Return the arrays in the order and shapes of `like`: torch Vectors of the peer turn a scalar into one element."""
    return [as_numpy(vector.coefs[name]).reshape(leaf.shape) for name, leaf in like.items()]


def as_numpy(array):
    if isinstance(array, tf.Tensor):
        return tf.cast(array, tf.float64).numpy()
    return array.double().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def allowed(framework, dtype, leaves):
    """Squares are added in the leaf's dtype, those of the leaves too; root, quotient and product round.

    Torch Vectors of float64 are multiplied by a coefficient that the peer rounds to float32.
    """
    shift = 2.0 * ULP["float32"] if (framework, dtype) == ("torch", "float64") else 0.0
    roundings = 4.0 + 0.25 * len(leaves) + plain_sum_ulps(count_of(leaves))
    return tolerance(dtype, count_of(leaves), peer_ulps=roundings, shift=shift)


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    mine, their = getattr(ours, name), getattr(peer, name)
    assert arguments(mine) == arguments(their)
    assert (mine.name, mine.aux_name) == (their.name, their.aux_name)


@pytest.mark.parametrize(("framework", "dtype"), CASES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_norm", [0.125, 64.0], ids=["clipped", "not clipped"])
def test_run(framework, dtype, name, max_norm):
    drawn = {key: leaf for key, leaf in gradients(NUMPY[dtype]).items() if leaf.size}
    vector = VECTORS[framework](drawn)
    mine, their = (getattr(module, name)(max_norm).run(vector) for module in (ours, peer))
    assert type(mine) is type(their) is type(vector)
    leaves = list(drawn.values())
    together = name == "L2GlobalClipping"
    exact = reference_clip(leaves, max_norm) if together else [reference_clip([x], max_norm)[0] for x in leaves]
    for my_leaf, their_leaf, exact_leaf in zip(numbers(mine, drawn), numbers(their, drawn), exact, strict=True):
        assert_matches(my_leaf, exact_leaf, tolerance(dtype, count_of(leaves)), dtype)
        assert_matches(my_leaf, their_leaf, allowed(framework, dtype, leaves), dtype)


@pytest.mark.parametrize("framework", VECTORS)
@pytest.mark.parametrize("name", NAMES)
def test_run_on_many_elements(framework, name):
    drawn = gradients(np.float32, large=True)
    mine, their = (getattr(module, name)(1.0).run(VECTORS[framework](drawn)) for module in (ours, peer))
    (exact,) = reference_clip(list(drawn.values()), 1.0)
    count = count_of(drawn.values())
    assert_matches(numbers(mine, drawn)[0], exact, tolerance("float32", count), "float32")
    rtol = allowed(framework, "float32", drawn.values())
    assert_matches(numbers(mine, drawn)[0], numbers(their, drawn)[0], rtol, "float32")


@pytest.mark.parametrize("framework", VECTORS)
def test_empty_vector(framework):
    empty = VECTORS[framework]({})
    assert ours.L2GlobalClipping().run(empty) is peer.L2GlobalClipping().run(empty) is empty
    assert ours.L2Clipping().run(empty).coefs == peer.L2Clipping().run(empty).coefs == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 2.5, math.inf])
def test_configuration(name, max_norm):
    mine, their = (getattr(module, name)(max_norm) for module in (ours, peer))
    assert mine.get_config() == their.get_config()
    assert mine.get_state() == their.get_state() == {}
    assert mine.collect_aux_var() is their.collect_aux_var() is None
    assert type(mine).from_config(their.get_config()).max_norm == max_norm
