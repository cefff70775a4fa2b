"""`clip_grad_norm` of `brainstate.nn`: its signature, its examples, orders, traced calls and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip.integrations.brainstate import clip_grad_norm
from parity_support import REQUIRED, arguments, assert_just_below

EXAMPLE = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
SQUARE = {"layer1": jnp.array([[-2.0, 3.0], [1.0, -4.0]])}


def test_signature():
    assert arguments(clip_grad_norm) == [
        ("grad", REQUIRED),
        ("max_norm", REQUIRED),
        ("norm_type", 2.0),
        ("return_norm", False),
    ]


@pytest.mark.parametrize("jit", [False, True])
def test_example(jit):
    def clip(grad, max_norm):
        return clip_grad_norm(grad, max_norm, return_norm=True)

    clipped, norm = (jax.jit(clip) if jit else clip)(EXAMPLE, 5.0)
    assert_just_below(clipped["w"], [15 / 13, 20 / 13], "float32")
    assert_just_below(clipped["b"], [60 / 13], "float32")
    assert (float(norm), norm.dtype, norm.shape) == (13.0, jnp.float32, ())
    assert isinstance(norm, jax.Array)


def test_returns_only_the_tree_unless_asked():
    clipped = clip_grad_norm(EXAMPLE, 5.0)
    assert list(clipped) == ["b", "w"] or list(clipped) == ["w", "b"]
    assert_just_below(clipped["w"], [15 / 13, 20 / 13], "float32")


@pytest.mark.parametrize(
    ("norm_type", "norm"),
    [
        (2, math.sqrt(30)),
        (None, math.sqrt(30)),
        (1, 10.0),
        (1.0, 10.0),
        (3, 100 ** (1 / 3)),
        ("inf", 4.0),
        (math.inf, 4.0),
        (jnp.inf, 4.0),
        ("-inf", 1.0),
        (-math.inf, 1.0),
        (-np.inf, 1.0),
    ],
    ids=repr,
)
def test_orders(norm_type, norm):
    clipped, found = clip_grad_norm(SQUARE, 0.5, norm_type, return_norm=True)
    assert float(found) == pytest.approx(norm, rel=2.0**-23)
    factor = 0.5 / norm
    assert_just_below(clipped["layer1"], [[-2 * factor, 3 * factor], [factor, -4 * factor]], "float32")


@pytest.mark.parametrize("norm_type", [0, 0.5, -1, "2", "fro", math.nan, True], ids=repr)
def test_unknown_orders(norm_type):
    with pytest.raises(ValueError, match="norm_type must be a number >= 1"):
        clip_grad_norm(EXAMPLE, 5.0, norm_type)


@pytest.mark.parametrize("max_norm", [13.0, 20.0, math.inf, jnp.array(20.0)], ids=repr)
def test_gradients_that_are_small_enough_come_back_as_they_were(max_norm):
    clipped, norm = clip_grad_norm(EXAMPLE, max_norm, return_norm=True)
    assert {name: leaf.tolist() for name, leaf in clipped.items()} == {"w": [3.0, 4.0], "b": [12.0]}
    assert float(norm) == 13.0


def test_max_norm_zero_gives_zeros():
    assert clip_grad_norm(EXAMPLE, 0.0)["w"].tolist() == [0.0, 0.0]
    assert clip_grad_norm(jnp.zeros(2), 0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, jnp.array(-1.0)], ids=["negative", "nan", "array"])
def test_negative_and_nan_thresholds(max_norm):
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        clip_grad_norm(EXAMPLE, max_norm)


def test_traced_negative_threshold_gives_zeros():
    assert jax.jit(clip_grad_norm)(EXAMPLE, -1.0)["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tree", [{}, [], (), {"a": {}, "b": None}], ids=repr)
def test_empty_tree_comes_back_with_norm_zero(tree):
    assert clip_grad_norm(tree, 1.0) == tree
    clipped, norm = clip_grad_norm(tree, 1.0, return_norm=True)
    assert clipped == tree
    assert isinstance(norm, jax.Array)
    assert (float(norm), norm.dtype, norm.shape) == (0.0, jnp.float32, ())


@pytest.mark.parametrize("norm_type", [1, 2, "inf", "-inf"])
def test_arrays_without_elements(norm_type):
    clipped, norm = clip_grad_norm([jnp.zeros((0, 3))], 1.0, norm_type, return_norm=True)
    assert clipped[0].shape == (0, 3)
    assert float(norm) == 0.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_each_leaf_keeps_its_dtype(dtype):
    clipped, norm = clip_grad_norm((jnp.array([3.0], dtype), jnp.array(4.0)), 1.0, return_norm=True)
    assert [leaf.dtype for leaf in clipped] == [dtype, "float32"]
    assert_just_below(clipped[0], np.array([0.6 + 0j] if dtype == "complex64" else [0.6]), dtype)
    assert (norm.dtype, float(norm)) == (jnp.float32, 5.0)


@pytest.mark.parametrize(
    "leaf", [np.array([3, 4]), np.array([3.0, 4.0]), jnp.array([3, 4])], ids=["int", "float", "jax"]
)
def test_numpy_and_integer_leaves_come_back_as_jax_floats(leaf):
    clipped = clip_grad_norm([leaf], 1.0)
    assert isinstance(clipped[0], jax.Array)
    assert clipped[0].dtype == jnp.float32
    assert_just_below(clipped[0], [0.6, 0.8], "float32")


def test_finite_gradients_never_overflow():
    clipped, norm = clip_grad_norm(jnp.array([3.0, 4.0]) * 2.0**100, 1.0, return_norm=True)
    assert float(norm) == 5 * 2.0**100
    assert_just_below(clipped, [0.6, 0.8], "float32")


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_seen_everywhere(jit, bad):
    clip = jax.jit(clip_grad_norm) if jit else clip_grad_norm
    clipped = clip([jnp.array([bad, 1.0]), jnp.array([2.0])], 1.0)
    assert all(np.isnan(leaf).all() for leaf in clipped)


def test_gradient_through_clipping_is_finite_at_zero():
    slope = jax.jit(jax.grad(lambda x: clip_grad_norm(x, 1.0).sum()))
    assert slope(jnp.zeros(2)).tolist() == [1.0, 1.0]


def test_nodes_that_only_jax_knows():
    @jax.tree_util.register_pytree_node_class
    class Scaled:
        dtype = "of what it holds"

        def __init__(self, value):
            self.value = value

        def tree_flatten(self):
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    clipped = clip_grad_norm({"a": Scaled(jnp.array([3.0, 4.0]))}, 1.0)
    assert isinstance(clipped["a"], Scaled)
    assert_just_below(clipped["a"].value, [0.6, 0.8], "float32")
