"""TensorFlow's eager tensors and variables on the CPU: what NumPy's arrays become, to the bit, and never written."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import gradclip
from fast_paths import in_full
from frameworks import DTYPES, numpy_dtype
from gradclip._src import look
from gradclip._src.backends.tensorflow.framework import HOST, TENSORFLOW

pytestmark = pytest.mark.xdist_group("tensorflow")
SHAPES = [(3,), (2, 5), (), (0, 4), (40_000,), (4, 1, 3)]  # more and less than what TensorFlow's own memory is for
FUNCTIONS = {
    "global": lambda tree, c: gradclip.clip_by_global_norm(tree, c),
    "order 1": lambda tree, c: gradclip.clip_by_global_norm(tree, c, ord=1),
    "order 3": lambda tree, c: gradclip.clip_by_global_norm(tree, c, ord=3),
    "largest": lambda tree, c: gradclip.clip_by_global_norm(tree, c, ord="inf"),
    "zero": lambda tree, c: gradclip.clip_by_global_norm(tree, c, nonfinite="zero"),
    "layers": lambda tree, c: gradclip.clip_by_layer_norm(tree, c),
    "norms": lambda tree, c: (gradclip.layer_norms(tree), gradclip.global_norm(tree)),
    "units": lambda tree, c: gradclip.clip_by_unit_norm(tree, c),
    "parts": lambda tree, c: (gradclip.partial_norm(tree).clip(tree, c), gradclip.global_norm(tree)),
}


def held(values, dtype=None):
    return tf.Variable(values, trainable=False, dtype=dtype)


def values(dtype, seed=0):
    rng = np.random.default_rng(seed)
    made = [rng.normal(size=shape) for shape in SHAPES]
    if "complex" in dtype:
        made = [x + 1j * rng.normal(size=x.shape) for x in made]
    return [np.asarray(x).astype(numpy_dtype(dtype)) for x in made]


def assert_same(ours, numpys):
    assert (ours.dtype.name, tuple(ours.shape)) == (numpys.dtype.name, numpys.shape)
    assert ours.numpy().tobytes() == numpys.tobytes()


def assert_all_same(ours, numpys):
    if isinstance(numpys, list | tuple):
        for one, other in zip(ours, numpys, strict=True):
            assert_all_same(one, other)
    else:
        assert_same(ours, np.asarray(numpys))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_numpy_to_the_bit(name, dtype):
    arrays = values(dtype)
    leaves = list(map(tf.constant, arrays))
    for threshold in (0.7, 1e6, 0.0):
        assert_all_same(FUNCTIONS[name](leaves, threshold), FUNCTIONS[name](arrays, threshold))
    assert_all_same(leaves, values(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_values_are_clamped_as_numpys(dtype):
    arrays = values(dtype)
    assert_all_same(gradclip.clip_by_value(list(map(tf.constant, arrays)), 0.3), gradclip.clip_by_value(arrays, 0.3))


@pytest.mark.parametrize("threshold", [0.7, 1e6])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_one_look_settles_is_what_the_pipeline_decides(dtype, threshold):
    leaves = list(map(tf.constant, values(dtype)))
    assert look.read(leaves) is not None
    for plain in in_full(gradclip.clip_by_global_norm, leaves, threshold):
        assert_all_same(
            gradclip.clip_by_global_norm(leaves, threshold), [[x.numpy() for x in plain[0]], _numpy(plain[1])]
        )


def _numpy(norms):
    return [norm.numpy() for norm in norms] if isinstance(norms, list) else norms.numpy()


def test_what_is_not_clipped_is_the_tensor_itself():
    leaves = [tf.constant([3.0, 4.0]), tf.constant([0.5], tf.bfloat16)]
    for tree in (leaves, [*leaves, tf.constant([1j])]):
        clipped, _ = gradclip.clip_by_global_norm(tree, 10.0)
        assert all(x is y for x, y in zip(clipped, tree, strict=True))


def test_a_layer_that_is_not_clipped_is_the_tensor_itself():
    leaves = [tf.constant([3.0, 4.0]), tf.constant([0.3, 0.4])]
    clipped, _ = gradclip.clip_by_layer_norm(leaves, 1.0)
    assert [x is y for x, y in zip(clipped, leaves, strict=True)] == [False, True]


def test_large_results_lie_in_memory_of_tensorflow():
    x = tf.ones(100_000)
    (made,) = HOST.new_like([x], copied=False)
    clipped, _ = gradclip.clip_by_global_norm(x, 1.0)
    assert made.device == clipped.device == x.device
    assert float(gradclip.global_norm(clipped)) == pytest.approx(1.0, rel=1e-6)
    assert tf.reduce_sum(clipped * clipped).numpy() == pytest.approx(1.0, rel=1e-3)


def test_operations_take_the_results():
    # They end the process where memory is not aligned.
    for size in range(1, 40):
        clipped, norm = gradclip.clip_by_global_norm([tf.ones(size), tf.ones(size, tf.float64)], 0.5)
        assert float(tf.reduce_sum(clipped[0] * 2.0) + tf.cast(norm, tf.float32)) > 0
        assert float(tf.reduce_sum(clipped[1] * 2.0)) > 0


def test_nonfinite_policies():
    tree = {"w": tf.constant([3.0, math.nan]), "b": tf.constant([4.0, math.inf])}
    clipped, norm = gradclip.clip_by_global_norm(tree, 1.0)
    assert all(np.isnan(x.numpy()).all() for x in clipped.values())
    clipped, norm = gradclip.clip_by_global_norm(tree, 1.0, nonfinite="zero")
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["b"], [0.8, 0.0], rtol=2e-7)
    clipped, _ = gradclip.clip_by_global_norm(tree, 1.0, nonfinite="drop")
    assert clipped["w"].numpy().tolist() == [0.0, 0.0]
    with pytest.raises(FloatingPointError, match=r"\['b'\]: 0 NaN, 1 infinite of 2 elements; \['w'\]: 1 NaN"):
        gradclip.clip_by_global_norm(tree, 1.0, nonfinite="raise")


def test_numbers_become_float32_and_integers_stay():
    clipped, norm = gradclip.clip_by_global_norm([tf.constant([3, 4]), tf.constant(3.0), 4.0, 7], 1.0)
    assert [x.dtype for x in (*clipped[:3], norm)] == [tf.int32, *[tf.float32] * 3]
    np.testing.assert_allclose(clipped[1:3], [0.6, 0.8], rtol=2e-7)
    assert (clipped[0].numpy().tolist(), clipped[3], float(norm)) == ([3, 4], 7, 5.0)
    assert gradclip.global_norm([tf.constant([1j], tf.complex64), 1j]).dtype == tf.float32


def test_thresholds_may_be_tensors_and_variables():
    x = tf.constant([3.0, 4.0])
    for threshold in (tf.constant(1.0), tf.Variable(1.0), tf.constant(1), tf.constant(1.0, tf.bfloat16)):
        np.testing.assert_allclose(gradclip.clip_by_global_norm(x, threshold)[0], [0.6, 0.8], rtol=2e-7)
        np.testing.assert_allclose(gradclip.clip_by_global_norm(np.array([3.0, 4.0]), threshold)[0], [0.6, 0.8])
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        gradclip.clip_by_global_norm(x, tf.constant(-1.0))
    with pytest.raises(TypeError, match="max_norm must be a real number"):
        gradclip.clip_by_global_norm(x, tf.constant([1.0]))


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="has dtype string, which cannot be clipped"):
        gradclip.clip_by_global_norm({"x": tf.constant("a"), "w": tf.ones(2)}, 1.0)


def test_frameworks_are_not_mixed():
    with pytest.raises(TypeError, match="one framework, got numpy and tensorflow"):
        gradclip.global_norm([tf.ones(2), np.ones(2)])


def test_variables_are_read_as_their_values():
    variable = tf.Variable([3.0, 4.0])
    clipped, norm = gradclip.clip_by_global_norm({"w": variable}, 1.0)
    assert float(norm) == 5.0
    assert isinstance(clipped["w"], tf.Tensor)
    kept, _ = gradclip.clip_by_global_norm([variable], 10.0)
    variable.assign([0.0, 0.0])
    assert kept[0].numpy().tolist() == [3.0, 4.0]


def variables():
    return [held([[3.0, 0.0]]), held([4.0], dtype=tf.float64), held([0.0], dtype=tf.bfloat16)]


IN_PLACE = {
    "norm": lambda grads: gradclip.clip_grad_norm_(grads, 1.0),
    "infinity": lambda grads: gradclip.clip_grad_norm_(grads, 1.0, "inf"),
    "value": lambda grads: gradclip.clip_grad_value_(grads, 0.5),
    "layers": lambda grads: gradclip.clip_grad_layer_norm_(grads, 1.0),
    "units": lambda grads: gradclip.clip_grad_unit_norm_(grads, 1.0, unit_axis=0),
    "not clipped": lambda grads: gradclip.clip_grad_norm_(grads, 10.0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_variables_are_clipped_by_assigning_to_them(name):
    grads = dict(zip("abc", variables(), strict=True))
    arrays = {key: x.numpy().copy() for key, x in grads.items()}
    before = {key: x.value() for key, x in grads.items()}
    ours, numpys = IN_PLACE[name](grads), IN_PLACE[name](arrays)
    for key, x in grads.items():
        assert_same(x.value(), arrays[key])
        assert before[key].numpy().tolist() == variables()["abc".index(key)].numpy().tolist()
    if numpys is not None:
        assert_all_same(_leaves(ours), _leaves(numpys))


def _leaves(tree):
    return list(tree.values()) if isinstance(tree, dict) else tree


def test_a_variable_listed_twice_counts_and_is_assigned_once(monkeypatch):
    variable, other = held([3.0]), held([4.0])
    kept = held([0.0])
    assigned = []
    plainly = type(variable).assign
    monkeypatch.setattr(type(variable), "assign", lambda x, *a, **k: (assigned.append(id(x)), plainly(x, *a, **k))[1])
    assert float(gradclip.clip_grad_norm_([variable, other, variable, kept], 1.0)) == 5.0
    assert assigned == [id(variable), id(other)]
    np.testing.assert_allclose(variable, [0.6], rtol=2e-7)


@pytest.mark.after_error
def test_nothing_is_assigned_where_something_is_wrong():
    good, bad = held([3.0]), held([math.nan])
    for tree, error in (
        ([held([3])], TypeError),
        ([good, tf.constant([3.0])], TypeError),
        ([good, np.ones(2)], TypeError),
    ):
        with pytest.raises(error):
            gradclip.clip_grad_norm_(tree, 1.0)
    with pytest.raises(FloatingPointError, match=r"\[1\]: 1 NaN"):
        gradclip.clip_grad_norm_([good, bad], 1.0, nonfinite="raise")
    with pytest.raises(ValueError, match="must not be negative"):
        gradclip.clip_grad_norm_([good], -1.0)
    assert good.numpy().tolist() == [3.0]


def test_variables_of_integers_are_not_assigned():
    good, steps = held([3.0]), held([100])
    norms = gradclip.clip_grad_layer_norm_([good, steps], 1.0)
    assert [float(norm) for norm in norms] == [3.0, 0.0]
    assert (good.numpy().tolist(), steps.numpy().tolist()) == ([pytest.approx(1.0)], [100])


def test_tensors_in_parameters_are_replaced():
    first, written = SimpleNamespace(grad=tf.constant([3.0])), SimpleNamespace(grad=held([4.0]))
    before, variable = first.grad, written.grad
    assert float(gradclip.clip_grad_norm_([first, written], 1.0)) == 5.0
    assert written.grad is variable
    np.testing.assert_allclose([first.grad.numpy()[0], variable.numpy()[0]], [0.6, 0.8], rtol=2e-7)
    assert before.numpy().tolist() == [3.0]
    gradclip.clip_grad_value_([first], 0.5)
    assert first.grad.numpy().tolist() == [0.5]


def test_thresholds_that_follow_and_monitors_take_tensors():
    thresholds, seen = [], []
    for make in (lambda x: np.array(x, np.float32), tf.constant):
        holder, monitor = gradclip.AdaptiveThreshold(gradclip.QuantileRule(0.5, window=4)), gradclip.Monitor()
        for length in (1.0, 2.0, 3.0, 4.0, 3.5, 0.5):
            gradclip.clip_grad_norm_([SimpleNamespace(grad=make([length]))], holder, monitor=monitor)
        thresholds.append(float(holder.max_norm))
        seen.append([step.norm for step in monitor.records])
    assert thresholds[0] == thresholds[1] > 0
    assert seen[0] == seen[1] == [1.0, 2.0, 3.0, 4.0, 3.5, 0.5]


def test_norms_are_decided_exactly():
    assert gradclip.norm_at_most({"w": tf.constant([3.0]), "b": tf.Variable([4.0])}, 5.0)
    assert not gradclip.norm_at_most(tf.constant([3.0, 4.0]), np.nextafter(5.0, 0.0))


def test_a_number_of_threads_that_the_user_has_limited():
    assert 1 <= HOST.threads() <= gradclip._src.native.default_threads()


def test_a_front_makes_arrays_like_a_leaf():
    for dtype in ("float16", "bfloat16", "float64"):
        made = TENSORFLOW.like(tf.ones(1), dtype, np.array([1.5, 2.0]))
        assert (made.dtype.name, made.numpy().astype(float).tolist()) == (dtype, [1.5, 2.0])
    assert TENSORFLOW.zeros((2,), tf.ones(1, tf.bfloat16)).numpy().tolist() == [0.0, 0.0]


def test_a_number_is_no_batch():
    with pytest.raises(ValueError, match=r"every leaf must carry the batch on axis 0.*\[0\] \(\)"):
        gradclip.per_example_clip([tf.constant(1.0)], 1.0)


def test_weights_are_no_gradients():
    weights = tf.Variable([3.0, 4.0])
    with pytest.warns(UserWarning, match=r"probably weights, .*tape\.gradient\(loss, variables\), max_norm\)"):
        gradclip.clip_grad_norm_([weights], 1.0)
    assert gradclip.grad_norm([held([3.0, 4.0])]) == 5.0
