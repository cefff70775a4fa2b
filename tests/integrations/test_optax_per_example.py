"""The per-example functions of `optax`: values worked out by hand, counts, layers and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip.integrations.optax import per_example_global_norm_clip, per_example_layer_norm_clip
from parity_support import REQUIRED, arguments, assert_matches, tolerance

EXAMPLES = [[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]]
both = pytest.mark.parametrize("clip", [per_example_global_norm_clip, per_example_layer_norm_clip])


def close(actual, expected, dtype="float32"):
    assert_matches(actual, expected, tolerance(dtype, int(np.size(expected))), dtype)
    return True


def count_of(counts):
    (count,) = jax.tree.leaves(counts)
    return int(count)


def test_signatures():
    assert arguments(per_example_global_norm_clip) == [("grads", REQUIRED), ("l2_norm_clip", REQUIRED)]
    assert arguments(per_example_layer_norm_clip) == [
        ("grads", REQUIRED),
        ("global_l2_norm_clip", REQUIRED),
        ("uniform", True),
    ]


@both
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("limit", "each", "count"), [(math.inf, 7.0, 0), (0.0, 0.0, 3), (1.25, 1.75, 3)])
def test_integer_examples_with_one_layer(clip, jit, limit, each, count):
    grads = [jnp.array(EXAMPLES)]
    summed, counts = (jax.jit(clip) if jit else clip)(grads, limit)
    assert close(summed[0], [each] * 3)
    assert summed[0].dtype == jnp.float32
    assert count_of(counts) == count
    assert jax.tree.leaves(counts)[0].dtype == jnp.int32
    assert grads[0].tolist() == EXAMPLES


def test_results_have_the_shape_of_the_tree():
    grads = {"a": {"c": jnp.ones((2, 3, 1))}, "b": (jnp.ones(2), None)}
    summed, count = per_example_global_norm_clip(grads, 10.0)
    assert jax.tree.structure(summed) == jax.tree.structure(grads)
    assert [leaf.shape for leaf in jax.tree.leaves(summed)] == [(3, 1), ()]
    assert (count.shape, count.dtype) == ((), jnp.int32)
    summed, counts = per_example_layer_norm_clip(grads, 10.0)
    assert jax.tree.structure(summed) == jax.tree.structure(counts) == jax.tree.structure(grads)
    assert [leaf.shape for leaf in jax.tree.leaves(counts)] == [(), ()]


def test_global_norm_is_that_of_all_leaves():
    # The examples' norms are 5, 0 and 10; only the last one exceeds 5.
    grads = {"w": jnp.array([[3.0], [0.0], [6.0]]), "b": jnp.array([4.0, 0.0, 8.0])}
    summed, count = per_example_global_norm_clip(grads, 5.0)
    assert close(summed["w"], [6.0])
    assert close(summed["b"], 8.0)
    assert int(count) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_uniform_layers(jit):
    # Two layers, C = 6 sqrt(2): each layer is clipped to 6.
    grads = {"w": jnp.array([[3.0, 4.0], [6.0, 8.0]]), "b": jnp.array([[1.0], [7.0]])}
    clip = jax.jit(per_example_layer_norm_clip) if jit else per_example_layer_norm_clip
    summed, counts = clip(grads, 6.0 * math.sqrt(2))
    assert close(summed["w"], [6.6, 8.8])
    assert close(summed["b"], [7.0])
    assert {name: int(count) for name, count in counts.items()} == {"w": 1, "b": 1}


@pytest.mark.parametrize("jit", [False, True])
def test_layers_in_proportion_to_their_sizes(jit):
    # 4 of 5 elements and 1 of 5, C = 5: layers are clipped to 2 sqrt(5) and sqrt(5).
    grads = [jnp.array([[10.0, 0.0, 0.0, 0.0]]), jnp.array([[10.0]])]
    clip = per_example_layer_norm_clip
    summed, counts = (jax.jit(clip, static_argnames="uniform") if jit else clip)(grads, 5.0, uniform=False)
    assert close(summed[0], [2 * math.sqrt(5), 0.0, 0.0, 0.0])
    assert close(summed[1], [math.sqrt(5)])
    assert [int(count) for count in counts] == [1, 1]


@pytest.mark.parametrize("layers", [1, 4])
def test_layer_norms_at_their_threshold_do_not_count(layers):
    # C / sqrt(K) is exactly the norm, 5, of each layer.
    grads = [jnp.array([[3.0, 4.0]])] * layers
    summed, counts = per_example_layer_norm_clip(grads, 5.0 * math.sqrt(layers))
    assert all(close(leaf, [3.0, 4.0]) for leaf in summed)
    assert [int(count) for count in counts] == [0] * layers


def test_layer_that_holds_all_elements_gets_the_whole_threshold():
    grads = [jnp.zeros((1, 0)), jnp.array([[3.0, 4.0]])]
    summed, counts = per_example_layer_norm_clip(grads, 5.0, uniform=False)
    assert [leaf.tolist() for leaf in summed] == [[], [3.0, 4.0]]
    assert [int(count) for count in counts] == [0, 0]


@both
@pytest.mark.parametrize(
    ("dtype", "out"),
    [("float16", "float32"), ("bfloat16", "float32"), ("complex64", "complex64"), ("int32", "float32")],
)
def test_sums_are_in_float32_at_least(clip, dtype, out):
    summed, _ = clip([jnp.array([[3, 4], [6, 8]], dtype)], 5.0)
    assert summed[0].dtype == out
    assert close(summed[0], np.array([6, 8], out), out)


@both
def test_sums_of_float64_stay_float64(clip):
    with jax.enable_x64(True):
        summed, counts = clip([jnp.array([[3.0, 4.0], [6.0, 8.0]])], 5.0)
        assert summed[0].dtype == jnp.float64
        assert close(summed[0], [6.0, 8.0], "float64")
        assert count_of(counts) == 1


@both
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_example_that_is_not_finite_contributes_nothing(clip, jit, bad):
    grads = [jnp.array([[3.0, 4.0], [bad, 1.0], [0.0, 0.5]])]
    summed, _ = (jax.jit(clip) if jit else clip)(grads, 1.0)
    assert close(summed[0], [0.6, 1.3])


@both
@pytest.mark.parametrize("jit", [False, True])
def test_batch_of_no_examples(clip, jit):
    summed, counts = (jax.jit(clip) if jit else clip)([jnp.zeros((0, 2))], 1.0)
    assert summed[0].tolist() == [0.0, 0.0]
    assert count_of(counts) == 0


@both
def test_numpy_and_bare_arrays(clip):
    summed, counts = clip(np.array([[3.0, 4.0], [0.0, 0.5]], np.float32), 1.0)
    assert isinstance(summed, jax.Array)
    assert close(summed, [0.6, 1.3])
    assert count_of(counts) == 1


@both
@pytest.mark.parametrize(
    "grads",
    [[jnp.array(1.0)], [jnp.ones((2, 2)), jnp.ones((3,))], {"a": jnp.ones((2, 2)), "b": jnp.array(1.0)}, []],
    ids=["scalar", "lengths", "one scalar", "nothing"],
)
def test_leaves_without_a_common_batch_axis(clip, grads):
    with pytest.raises(ValueError, match="axis 0"):
        clip(grads, 1.0)


@both
@pytest.mark.parametrize("limit", [-1.0, math.nan, jnp.array(-1.0)], ids=["negative", "nan", "array"])
def test_negative_and_nan_thresholds(clip, limit):
    with pytest.raises(ValueError, match="must not be negative or NaN"):
        clip([jnp.array(EXAMPLES)], limit)


@both
def test_traced_negative_threshold_gives_zeros(clip):
    summed, _ = jax.jit(clip)([jnp.array(EXAMPLES)], -1.0)
    assert summed[0].tolist() == [0.0, 0.0, 0.0]


def test_per_example_gradients_of_a_model():
    # The loss of an example (x, y) is (w.x - y)**2 / 2 at w = 0, so its gradient is -y x: (-3, -4) and (0.5, 0).
    def loss(w, x, y):
        return (w @ x - y) ** 2 / 2

    x, y = jnp.array([[3.0, 4.0], [0.5, 0.0]]), jnp.array([1.0, -1.0])
    grads = jax.vmap(jax.grad(loss), (None, 0, 0))(jnp.zeros(2), x, y)
    summed, count = per_example_global_norm_clip(grads, 1.0)
    assert close(summed, [-0.1, -0.8])
    assert int(count) == 1
