"""Containers that `tf.nest` knows, and rows of embeddings: merged, clipped, and sparse as before."""

import math
from collections import namedtuple

import numpy as np
import optree
import pytest
import tensorflow as tf

import gradclip

pytestmark = pytest.mark.xdist_group("tensorflow")
Pair = namedtuple("Pair", ["first", "second"])
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def slices(values, indices, dtype="float32", shape=None):
    dense = None if shape is None else tf.constant(shape)
    return tf.IndexedSlices(tf.cast(tf.constant(values), dtype), tf.constant(indices), dense)


def tracked(value):
    """Return a container as `tf.Module` wraps it."""
    module = tf.Module()
    module.held = value
    return module.held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_pieces_of_a_row_count_as_their_sum(dtype, index):
    leaf = slices([[3.0], [4.0]], np.array([1, 1], index), dtype, [5, 1])
    if dtype == "float32":
        assert tf.linalg.global_norm([leaf]).numpy() == 5.0  # TensorFlow's own, where the row is 7
    assert float(gradclip.global_norm(leaf)) == 7.0
    for compile in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        (clipped,), norm = compile(lambda values: gradclip.clip_by_global_norm([with_values(leaf, values)], 3.5))(
            leaf.values
        )
        assert float(norm) == 7.0
        assert isinstance(clipped, tf.IndexedSlices)
        assert clipped.dtype == dtype
        assert clipped.indices.dtype == index
        assert clipped.indices.numpy().tolist() == [1, 1]
        assert clipped.dense_shape.numpy().tolist() == [5, 1]
        found = clipped.values.numpy().astype(complex).reshape(-1)
        assert found[1] == 0
        assert 3.5 * 0.99 < found[0].real <= 3.5


def with_values(leaf, values):
    return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)


FUNCTIONS = {
    "global": lambda tree: gradclip.clip_by_global_norm(tree, 2.0)[0],
    "layer": lambda tree: gradclip.clip_by_layer_norm(tree, 2.0)[0],
    "prefix": lambda tree: gradclip.clip_by_layer_norm(tree, {"w": 2.0, "b": 1.0})[0],
    "value": lambda tree: gradclip.clip_by_value(tree, 1.5),
    "parts": lambda tree: gradclip.partial_norm(tree).clip(tree, 2.0),
    "kept": lambda tree: gradclip.clip_by_global_norm(tree, 1e6)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_clipped_as_the_dense_array(name):
    leaf = slices([[1.0, 2.0], [0.5, -0.5], [2.0, 2.0], [9.0, 1.0]], [3, 0, 3, 1], shape=[5, 2])
    dense = tf.convert_to_tensor(leaf)
    result = FUNCTIONS[name]({"w": leaf, "b": tf.constant([0.5, -2.0])})
    expected = FUNCTIONS[name]({"w": dense, "b": tf.constant([0.5, -2.0])})
    np.testing.assert_allclose(tf.convert_to_tensor(result["w"]), expected["w"], rtol=1e-6)
    np.testing.assert_allclose(result["b"], expected["b"], rtol=1e-6)
    assert result["w"].indices.numpy().tolist() == [3, 0, 3, 1]


def test_rows_count_whatever_shape_they_are_said_to_have():
    assert float(gradclip.global_norm(slices([[3.0], [4.0]], [7, 1], shape=[2, 1]))) == 5.0
    assert float(gradclip.global_norm(slices(np.zeros((0, 3), np.float32), np.zeros(0, np.int32)))) == 0.0


def test_thousands_of_pieces_add_up_in_half_types():
    for dtype in ("float16", "bfloat16"):
        many = slices(np.ones((3000, 1)), np.zeros(3000, np.int32), dtype)
        assert float(gradclip.global_norm(many)) == pytest.approx(3000.0, rel=2.0**-8)


def test_what_is_in_one_piece_and_not_clipped_stays_bit_for_bit():
    values = np.array([[3.0], [-0.0], [1e-45], [4.0], [0.0]], np.float32)
    leaf = tf.IndexedSlices(tf.constant(values), tf.constant([3, 0, 2, 1, 1]))
    clipped, _ = gradclip.clip_by_global_norm(leaf, 5.1)
    assert clipped.values.numpy().tobytes() == values.tobytes()


def test_gradients_pass_through_rows():
    values = tf.constant([[1.0], [2.0], [4.0]])

    def length(values):
        clipped, _ = gradclip.clip_by_global_norm(tf.IndexedSlices(values, tf.constant([1, 1, 0])), 2.0)
        return tf.reduce_sum(clipped.values * tf.constant([[1.0], [5.0], [2.0]]))

    def of_dense(values):
        rows = tf.stack([values[0] + values[1], values[2]])
        return tf.reduce_sum(gradclip.clip_by_global_norm(rows, 2.0)[0] * tf.constant([[1.0], [2.0]]))

    found = []
    for function in (length, of_dense):
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = function(values)
        found.append(tf.convert_to_tensor(tape.gradient(result, values)).numpy())
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(
    ("leaf", "instead"),
    [
        (tf.SparseTensor([[0]], [1.0], [3]), r"SparseTensor\. Pass tf\.sparse\.to_dense\(x\)"),
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), r"RaggedTensor\. Pass x\.flat_values"),
    ],
)
def test_other_sparse_arrays_say_what_to_pass(leaf, instead):
    for tree in (leaf, {"w": leaf}, [tf.ones(2), leaf]):
        with pytest.raises(TypeError, match=f"must be tf.IndexedSlices, got {instead}"):
            gradclip.clip_by_global_norm(tree, 1.0)


def test_examples_must_be_dense():
    with pytest.raises(TypeError, match=r"must be dense, got IndexedSlices at \['w'\]"):
        gradclip.per_example_clip({"w": slices([[3.0]], [0])}, 1.0)


def test_nonfinite_rows_are_named():
    tree = {"w": slices([[math.nan], [4.0]], [0, 1])}
    with pytest.raises(FloatingPointError, match=r"\['w'\]: 1 NaN"):
        gradclip.clip_by_global_norm(tree, 1.0, nonfinite="raise")


def test_containers_of_modules_come_back():
    wrapped = tracked([tf.constant([3.0]), None, {"z": tf.constant([4.0]), "n": None}])
    for tree in (wrapped, {"a": wrapped, "e": ()}, Pair([], [wrapped])):
        clipped, norm = gradclip.clip_by_global_norm(tree, 1.0)
        assert float(norm) == 5.0
        found = clipped["a"] if isinstance(clipped, dict) else clipped[1][0] if isinstance(clipped, Pair) else clipped
        assert type(found) is type(wrapped)
        assert (found[1], found[2]["n"], type(found[2])) == (None, None, type(wrapped[2]))
        np.testing.assert_allclose([found[0][0], found[2]["z"][0]], [0.6, 0.8], rtol=2e-7)
    norms = gradclip.layer_norms(wrapped)
    assert (float(norms[0]), norms[1], float(norms[2]["z"])) == (3.0, None, 4.0)


def test_containers_nobody_registered_are_nodes_with_tensors_only():
    wrapped = tracked({"w": [tf.Variable([x], trainable=False) for x in (3.0, 4.0)]})
    assert float(gradclip.clip_grad_norm_(wrapped, 1.0)) == 5.0
    np.testing.assert_allclose(wrapped["w"][0], [0.6], rtol=2e-7)
    assert optree.tree_leaves(wrapped) == [wrapped]  # others who use optree see what they saw before


def test_paths_are_written_as_python_reaches_the_leaf():
    bad = tf.constant([math.nan])
    wrapped = tracked([tf.ones(1), {"z": Pair(tf.ones(1), bad)}])
    for tree, path in ((wrapped, r"\[1\]\['z'\]\.second"), ({"q": [wrapped]}, r"\['q'\]\[0\]\[1\]\['z'\]\.second")):
        with pytest.raises(FloatingPointError, match=f"leaves: {path}: 1 NaN"):
            gradclip.clip_by_global_norm(tree, 1.0, nonfinite="raise")


class Layer:
    """A container that says by itself what it holds."""

    def __init__(self, name, weights, bias):
        self.name, self.weights, self.bias = name, weights, bias

    def __tf_flatten__(self):
        return self.name, (self.weights, self.bias)

    @classmethod
    def __tf_unflatten__(cls, name, held):
        return cls(name, *held)


def test_containers_that_cannot_be_indexed_are_nodes():
    found, norm = gradclip.clip_by_global_norm([Layer("dense", tf.constant([3.0]), None), tf.constant([4.0])], 1.0)
    assert (type(found[0]), found[0].name, found[0].bias, float(norm)) == (Layer, "dense", None, 5.0)
    np.testing.assert_allclose(found[0].weights, [0.6], rtol=2e-7)
    (value,), _ = gradclip.clip_by_global_norm({"a": tf.constant([5.0])}.values(), 1.0)
    np.testing.assert_allclose(value, [1.0], rtol=2e-7)
    with pytest.raises(FloatingPointError, match=r"leaves: \[1\]: 1 NaN"):
        gradclip.clip_by_global_norm(Layer("dense", tf.ones(1), tf.constant([math.nan])), 1.0, nonfinite="raise")


def test_plain_containers_are_prefixes_of_wrapped_ones():
    wrapped = tracked({"a": [tf.constant([3.0]), tf.constant([4.0])], "b": tf.constant([6.0])})
    clipped, norms = gradclip.clip_by_layer_norm(wrapped, {"a": 1.0, "b": 10.0})
    assert {key: float(norm) for key, norm in norms.items()} == {"a": 5.0, "b": 6.0}
    np.testing.assert_allclose(clipped["a"][1], [0.8], rtol=2e-7)
    assert clipped["b"].numpy().tolist() == [6.0]
    with pytest.raises(ValueError, match="prefix of the tree"):
        gradclip.clip_by_layer_norm(wrapped, {"a": 1.0})


def test_a_tree_of_nobody_is_an_error_as_before():
    with pytest.raises(TypeError, match=r"got .* of type Module at \['q'\]"):
        gradclip.global_norm({"q": tf.Module(), "w": tf.ones(1)})
    with pytest.raises(TypeError, match=r"of type range at \['q'\]"):
        gradclip.global_norm({"q": range(3), "w": tf.ones(1)})
