"""Tensors whose values are not looked at: in `tf.function` and compiled by XLA, in exact arithmetic."""

import math
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
import tensorflow as tf

import gradclip
from frameworks import DTYPES
from gradclip._src.backends.tensorflow.graph import Graph
from gradclip._src.tree import flatten
from rational import at_most, power_of_norm, random_leaf, random_threshold

MODES = ("function", "xla")
ORDERS = (1, 2, math.inf)
SHAPE = (17,)
NARROW = ("float16", "bfloat16")


def recorded(function, mode, *specs):
    return tf.function(function, jit_compile=mode == "xla", input_signature=specs or None)


@cache
def clipper(mode, dtype):
    """Return a function of numbers and of one threshold for each order."""
    clip = lambda x, c, ord: gradclip.clip_by_global_norm(x, c, ord=ord)[0]
    specs = tf.TensorSpec(SHAPE, dtype), tf.TensorSpec(len(ORDERS), tf.float64)
    return recorded(lambda x, given: [clip(x, given[i], ord) for i, ord in enumerate(ORDERS)], mode, *specs)


def finite_leaves(rng, dtype, count):
    leaves = (random_leaf(rng, dtype, SHAPE[0]) for _ in range(count))
    return [x for x in leaves if np.isfinite(x.astype(np.complex128)).all()]


def kept(x, y):
    return np.array_equal(x.view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_result_exceeds_a_threshold_that_is_recorded(mode, dtype):
    rng = np.random.default_rng([len(dtype), 3])
    clip = clipper(mode, dtype)
    clipped = Counter()
    for x in finite_leaves(rng, dtype, 60):
        thresholds = [random_threshold(rng, [x], ord) for ord in ORDERS]
        for ord, threshold, found in zip(ORDERS, thresholds, clip(tf.constant(x), thresholds), strict=True):
            result = np.asarray(found)
            clipped[ord] += not kept(x, result)
            if ord != 2 and "complex" in dtype:  # magnitudes are irrational
                assert np.linalg.norm(result.astype(np.complex128) / threshold, ord) <= 1 + 1e-12
            else:
                assert at_most([result], ord, threshold)
    assert min(clipped[ord] for ord in ORDERS) > 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_result_exceeds_a_number_and_ordinary_ones_are_near_it(mode, dtype):
    rng = np.random.default_rng(0)
    thresholds = 1e-30, 3e-5, 1.0, 1e30
    clip = recorded(lambda x: [gradclip.clip_by_global_norm(x, threshold)[0] for threshold in thresholds], mode)
    for x in finite_leaves(rng, dtype, 15):
        for threshold, result in zip(thresholds, clip(tf.constant(x)), strict=True):
            assert at_most([np.asarray(result)], 2, threshold)
    given = tf.cast(tf.constant(rng.normal(size=SHAPE).astype(np.float32)), dtype)
    for threshold, result in zip(thresholds, clip(given), strict=True):
        if threshold > 1e-6 or dtype not in NARROW:
            check_near(np.asarray(given), np.asarray(result), threshold, 0.99 if dtype in NARROW else 1 - 1e-5)


def check_near(given, result, threshold, share):
    """Check that the result is what was given, or above so much of the threshold."""
    if at_most([given], 2, threshold):
        assert kept(given, result)
    else:
        assert power_of_norm([result], 2) >= (Fraction(share) * Fraction(threshold)) ** 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_stays_keeps_all_bits_of_subnormal_numbers(mode, dtype):
    smallest = 2.0**-1074 if dtype == "float64" else 2.0**-133 if dtype == "bfloat16" else 2.0**-149
    x = np.asarray(tf.constant([1.0, 0.0, -0.0])).astype(tf.as_dtype(dtype).as_numpy_dtype)
    x[1] = np.array(3 * smallest).astype(x.dtype)
    assert x[1] != 0
    clip = recorded(lambda t: [gradclip.clip_by_global_norm(t, threshold)[0] for threshold in (2.0, 0.5)], mode)
    whole, smaller = clip(tf.constant(x))
    assert kept(x, whole)
    assert at_most([np.asarray(smaller)], 2, 0.5)


@pytest.mark.parametrize("mode", MODES)
def test_elements_that_are_read_as_zero_count_in_the_floor(mode):
    # TensorFlow adds these up to 0. Their norm is 2**-130, above the threshold.
    x = tf.constant(np.full(2**10, 2.0**-135, np.float32))
    result, _ = recorded(lambda t: gradclip.clip_by_global_norm(t, 2.0**-131), mode)(x)
    assert at_most([np.asarray(result)], 2, 2.0**-131)


@pytest.mark.parametrize("mode", MODES)
def test_tiny_thresholds_that_are_recorded(mode):
    # Nothing may stay that has not been read, and what can be read is clipped well.
    clip = lambda x, threshold: np.asarray(clipper(mode, "float32")(x, [threshold] * len(ORDERS))[ORDERS.index(2)])
    for factor, threshold in [(2.0**-135, 2.0**-134), (2.0**-135, 0.0), (2.0**-100, 2.0**-99), (1.0, 2.0**-126)]:
        given = np.full(SHAPE, factor, np.float32)
        assert at_most([clip(given, threshold)], 2, threshold)
    given = np.full(SHAPE, 1.0, np.float32)
    result = clip(given, 2.0**-90)
    assert power_of_norm([result], 2) >= (Fraction(1 - 1e-5) * Fraction(2.0**-90)) ** 2


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_seen_in_any_order(mode):
    # XLA's own maximum on the CPU passes over NaN.
    orders = 1, 2, 3, math.inf, -math.inf
    clip = recorded(lambda t: [gradclip.clip_by_global_norm([t], 1.0, ord=ord) for ord in orders], mode)
    for value, place in product((math.nan, math.inf), range(3)):
        x = np.float32([3.0, 4.0, 5.0])
        x[place] = value
        for (result,), norm in clip(tf.constant(x)):
            assert np.isnan(result).all()
            assert not np.isfinite(norm)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("policy", "expected"), [("zero", [0.6, 0.8, 0.0]), ("drop", [0.0, 0.0, 0.0])])
def test_policies(mode, policy, expected):
    clip = recorded(lambda t: gradclip.clip_by_global_norm([t], 1.0, nonfinite=policy), mode)
    for value in (math.nan, math.inf, -math.inf):
        (result,), _ = clip(tf.constant([3.0, 4.0, value]))
        np.testing.assert_allclose(result, expected, rtol=3e-7)
    (result,), _ = clip(tf.constant([3.0, 0.0, 4.0]))
    np.testing.assert_allclose(result, [0.6, 0.0, 0.8], rtol=3e-7)


def test_raise_is_for_values_that_are_known():
    with pytest.raises(ValueError, match="raise"):
        recorded(lambda t: gradclip.clip_by_global_norm(t, 1.0, nonfinite="raise"), "function")(tf.ones(3))


@pytest.mark.parametrize("mode", MODES)
def test_every_functional_name_gives_what_numpy_gives(mode):
    rng = np.random.default_rng(5)
    tree = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=5).astype(np.float64)}
    calls = {
        "norm": lambda t: gradclip.global_norm(t),
        "norm of order 3": lambda t: gradclip.global_norm(t, ord=3),
        "norms": lambda t: gradclip.layer_norms(t),
        "global": lambda t: gradclip.clip_by_global_norm(t, 1.0),
        "layer": lambda t: gradclip.clip_by_layer_norm(t, 1.0),
        "layers": lambda t: gradclip.clip_by_layer_norm(t, {"w": 0.5, "b": 9.0}),
        "value": lambda t: gradclip.clip_by_value(t, 0.3),
        "unit": lambda t: gradclip.clip_by_unit_norm(t, 1.0),
        "examples": lambda t: gradclip.per_example_clip(t["w"], 1.0),
        "examples by layer": lambda t: gradclip.per_example_clip({"w": t["w"]}, 1.0, per_layer=True),
    }
    together = recorded(lambda t: {name: call(t) for name, call in calls.items()}, mode)
    found = together({key: tf.constant(x) for key, x in tree.items()})
    for name, call in calls.items():
        mine, known = (gradclip._src.tree.flatten(x).leaves for x in (found[name], call(tree)))
        for x, y in zip(mine, known, strict=True):
            np.testing.assert_allclose(np.asarray(x), y, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_variables_are_read_when_the_graph_runs(mode):
    variable = tf.Variable([3.0, 4.0])
    norm = recorded(lambda: gradclip.global_norm([variable]), mode)
    assert float(norm()) == 5.0
    variable.assign([0.0, 2.0])
    assert float(norm()) == 2.0


def test_rows_of_unknown_number():
    clip = recorded(lambda x: gradclip.clip_by_global_norm([x], 1.0), "function", tf.TensorSpec([None, 2]))
    for rows in (0, 1, 1000):
        (result,), _ = clip(tf.ones([rows, 2]))
        assert at_most([np.asarray(result)] if rows else [np.zeros(1)], 2, 1.0)
        assert result.shape == (rows, 2)
    assert float(tf.norm(tf.cast(result, tf.float64))) > 1 - 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_unknown_rank_come_back_in_their_shape(mode):
    x = tf.constant([[3.0, 4.0], [6.0, 8.0]])
    ours = {
        "tree": lambda x: gradclip.clip_by_global_norm([x, x], 1.0)[0],
        "layers": lambda x: gradclip.clip_by_layer_norm([x, x], [1.0, 2.0])[0],
        "values": lambda x: gradclip.clip_by_value(x, 5.0),
        "ord": lambda x: gradclip.clip_by_global_norm(x, 1.0, ord=3, nonfinite="zero")[0],
        "rows": lambda x: gradclip.clip_by_global_norm([tf.IndexedSlices(x, [0, 1])], 1.0)[0][0].values,
        "gradient": lambda x: tf.gradients(gradclip.clip_by_global_norm(x, 1.0)[0] * [1.0, 2.0], x),
        "norm": gradclip.global_norm,
    }
    together = lambda x: {name: function(x) for name, function in ours.items()}
    found, known = (recorded(together, mode, *specs)(x) for specs in ([tf.TensorSpec(None)], []))
    for y, z in zip(flatten(found).leaves, flatten(known).leaves, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-6)
        assert y.shape == z.shape


def test_variables_of_unknown_rank_are_assigned_in_their_shape():
    variable = tf.Variable([[3.0, 4.0]], shape=tf.TensorShape(None), trainable=False)
    for function in (
        lambda: gradclip.clip_grad_norm_([variable], 1.0),
        lambda: gradclip.clip_grad_value_([variable], 0.5),
        lambda: gradclip.clip_grad_norm_([variable], 0.5, ord=3, nonfinite="zero"),
    ):
        recorded(function, "function")()
        assert variable.numpy().shape == (1, 2)
    assert at_most([variable.numpy()], 3, 0.5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: gradclip.clip_by_unit_norm(x, 1.0),
        lambda x: gradclip.adaptive_grad_clip(x, x, clipping=1.0),
        lambda x: gradclip.per_example_clip(x, 1.0),
    ],
)
def test_parts_of_tensors_of_unknown_rank_are_an_error(function):
    with pytest.raises(ValueError, match=r"tf\.function must know how many axes a tensor has"):
        recorded(function, "function", tf.TensorSpec(None))(tf.ones([2, 2]))


@pytest.mark.parametrize("mode", MODES)
def test_a_recorded_threshold_clips_numbers_and_trees_without_arrays(mode):
    clip = lambda tree: recorded(lambda c: gradclip.clip_by_global_norm(tree, c), mode)(tf.constant(1.0))
    np.testing.assert_allclose(clip([3.0, 4.0])[0], [0.6, 0.8], rtol=1e-6)
    for tree in ([], [None]):
        found, norm = clip(tree)
        assert list(found) == tree
        assert float(norm) == 0.0
    with pytest.raises(TypeError, match="one framework, got numpy and tensorflow"):
        clip([np.ones(2)])


def test_what_needs_values_says_so_while_they_are_recorded():
    with pytest.raises(ValueError, match="partial_norm needs concrete values"):
        recorded(gradclip.partial_norm, "function")(tf.ones(2))
    with tf.Graph().as_default(), pytest.raises(ValueError, match="TensorFlow 1 graphs are not supported"):
        gradclip.global_norm(tf.ones(2))


@pytest.mark.parametrize("size", [2**19 - 1, 2**19, 2**24 + 3])
def test_large_tensors_are_added_up_in_pieces(size):
    x = tf.constant(np.random.default_rng(0).integers(-3, 4, size), tf.float16)
    norm = recorded(lambda t: gradclip.global_norm(tf.cast(t, tf.float32)), "function")(x)
    np.testing.assert_allclose(float(norm), math.sqrt(int(np.square(np.asarray(x), dtype=np.float64).sum())), rtol=1e-7)


def test_autograph_leaves_gradclip_alone():
    from tensorflow.python.autograph.core import config

    assert any(rule.matches("gradclip.clip") for rule in config.CONVERSION_RULES)


def test_vectorized_map():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    clipped, norms = tf.vectorized_map(lambda row: gradclip.clip_by_global_norm(row, 1.0), tf.constant(x))
    for row, mine, norm in zip(x, clipped, norms, strict=True):
        expected, known = gradclip.clip_by_global_norm(row, 1.0)
        np.testing.assert_allclose(mine, expected, rtol=3e-7)
        np.testing.assert_allclose(norm, known, rtol=3e-7)


def test_eager_tensors_elsewhere_are_clipped_without_a_look():
    # What an accelerator's tensors take: nothing of it may ask for a value.
    backend = Graph(visible=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradclip._src.backends.tensorflow.framework.in_host_memory", lambda x: False)
        patch.setattr("gradclip._src.backends.tensorflow.framework.all_tensors_on_cpu", lambda x: False)
        found, norm = gradclip.clip_by_global_norm([tf.constant([3.0, 4.0])], 1.0)
    assert not backend.concrete
    np.testing.assert_allclose(found[0], [0.6, 0.8], rtol=3e-7)
    assert float(norm) == 5.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_norm", [2**53 + 3, 2**63 - 1])
def test_an_integer_as_threshold_does_not_grow(mode, max_norm):
    clip = recorded(lambda x, c: gradclip.clip_by_value([x], c)[0], mode)
    (found,) = clip(tf.constant([1e30], tf.float64), tf.constant(max_norm, tf.int64)).numpy()
    assert max_norm * (1 - 1e-15) <= Fraction(float(found)) <= max_norm


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("bound", [tf.float16, tf.float64])
def test_bounds_of_another_dtype_have_derivatives(dtype, bound):
    @tf.function
    def slopes(x, c):
        with tf.GradientTape() as tape:
            tape.watch([x, c])
            made = tf.reduce_sum(gradclip.clip_by_value(x, c))
        return tape.gradient(made, [x, c])

    of_x, of_bound = slopes(tf.constant([3.0, 0.25, -2.0, 4.0], dtype), tf.constant(1.0, bound))
    assert (of_x.dtype, of_bound.dtype) == (dtype, bound)
    assert of_x.numpy().tolist() == [0.0, 1.0, 0.0, 0.0]
    assert float(of_bound) == 1.0
