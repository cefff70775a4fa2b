"""What JAX's results are besides their values: memory of their own, and the dtype, range and place of the input."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from gradclip import (
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    clip_grad_norm_,
    clip_grad_value_,
    global_norm,
    grad_norm,
    layer_norms,
    partial_norm,
    per_example_clip,
)
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip.integrations import brainstate, jax_privacy, optax

FUNCTIONAL = {
    "global": lambda tree, c: clip_by_global_norm(tree, c)[0],
    "largest": lambda tree, c: clip_by_global_norm(tree, c, ord="inf")[0],
    "layer": lambda tree, c: clip_by_layer_norm(tree, c)[0],
    "prefix": lambda tree, c: clip_by_layer_norm(tree, [c] * len(tree))[0],
    "value": clip_by_value,
    "parts": lambda tree, c: partial_norm(tree).clip(tree, c),
    "raise": lambda tree, c: clip_by_global_norm(tree, c, nonfinite="raise")[0],
    "zero": lambda tree, c: clip_by_global_norm(tree, c, nonfinite="zero")[0],
    "drop": lambda tree, c: clip_by_global_norm(tree, c, nonfinite="drop")[0],
}
OF_JAX = {
    "optax": lambda tree, c: optax.clip_by_global_norm(c).update(tree, None)[0],
    "optax value": lambda tree, c: optax.clip(c).update(tree, None)[0],
    "optax blocks": lambda tree, c: optax.clip_by_block_rms(c).update(tree, None)[0],
    "brainstate": lambda tree, c: brainstate.clip_grad_norm(tree, c),
    "jax_privacy": lambda tree, c: jax_privacy.clip_pytree(tree, c)[0],
}
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
PAIRS = [(name, dtype) for name in FUNCTIONAL for dtype in DTYPES if name != "value" or "complex" not in dtype]
THRESHOLDS = (0.0, 0.5, 1e300)
LARGE = 1 << 18


def numpy_leaves(dtype, large=5):
    rng = np.random.default_rng(0)
    leaves = [rng.standard_normal(shape) * 2 for shape in ((3, 4), (large,), (), (0, 3))]
    if "complex" in dtype:
        leaves = [x + 1j * x[..., ::-1] if x.ndim else x + 1j for x in leaves]
    return [np.asarray(x).astype(getattr(ml_dtypes, dtype, None) or dtype) for x in leaves]


def jax_array(x, device=None):
    """Return the array in its own dtype, whatever the mode."""
    with jax.enable_x64(True):
        return jnp.array(x) if device is None else jax.device_put(x, device)


def bits(x):
    return np.asarray(x).tobytes()


def assert_alike(result, leaf):
    assert result is not leaf
    assert isinstance(result, jax.Array)
    assert (result.shape, result.dtype, result.weak_type) == (leaf.shape, leaf.dtype, leaf.weak_type)
    assert (result.sharding, result.committed) == (leaf.sharding, leaf.committed)
    if leaf.size:
        assert result.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_results_are_new_arrays_like_the_input(name, dtype, committed):
    numbers = numpy_leaves(dtype)
    for threshold in THRESHOLDS:
        leaves = [jax_array(x, jax.devices()[0] if committed else None) for x in numbers]
        expected = FUNCTIONAL[name](numbers, threshold)
        for result, leaf, exact in zip(FUNCTIONAL[name](leaves, threshold), leaves, expected, strict=True):
            assert_alike(result, leaf)
            assert bits(result) == bits(exact)


@pytest.mark.parametrize("name", OF_JAX)
def test_results_of_integrations_are_new_arrays(name):
    for threshold in THRESHOLDS:
        leaves = [jax_array(x) for x in numpy_leaves("float32")]
        for result, leaf in zip(OF_JAX[name](leaves, threshold), leaves, strict=True):
            assert_alike(result, leaf)


@pytest.mark.parametrize("threshold", [0.5, 1e300])
@pytest.mark.parametrize("name", [*FUNCTIONAL, *OF_JAX])
def test_the_input_outlives_a_donated_result(name, threshold):
    leaves = [jax_array(x) for x in numpy_leaves("float32", LARGE)]
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    step((FUNCTIONAL | OF_JAX)[name](leaves, threshold))
    assert [bits(x) for x in leaves] == [bits(x) for x in numpy_leaves("float32", LARGE)]


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_results_of_numpy_and_pytorch_are_no_views(name, dtype):
    for threshold in THRESHOLDS:
        numbers = numpy_leaves(dtype)
        for result, leaf in zip(FUNCTIONAL[name](numbers, threshold), numbers, strict=True):
            assert result is not leaf
            assert not np.shares_memory(result, leaf)
        if dtype != "bfloat16":
            tensors = [torch.from_numpy(x) for x in numbers]
            for result, leaf in zip(FUNCTIONAL[name](tensors, threshold), tensors, strict=True):
                assert result is not leaf
                assert not leaf.numel() or result.data_ptr() != leaf.data_ptr()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_norms_of_wide_arrays_keep_dtype_and_range(dtype):
    tree = [jax_array(np.array([3e200, 4e200], dtype)), jax_array(np.array(0.0, dtype))]
    numbers = [
        global_norm(tree),
        clip_by_global_norm(tree, 1.0)[1],
        layer_norms(tree)[0],
        clip_by_layer_norm(tree, 1.0)[1][0],
        grad_norm([SimpleNamespace(grad=x) for x in tree]),
        brainstate.clip_grad_norm(tree, 1.0, return_norm=True)[1],
    ]
    assert [x.dtype for x in numbers] == ["float64"] * len(numbers)
    assert np.allclose([np.asarray(x) for x in numbers], 5e200, rtol=1e-14)


@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"rule": "normalize"}, {"to_unit": True}, {"mask": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_private_sums_are_those_of_numpy(dtype, options):
    if "mask" in options:
        options = {"mask": np.array([True, False, True])}
    batch = [x.reshape(3, -1) for x in numpy_leaves(dtype, 6) if x.size > 2]
    batch[0][1] *= 1e3 if dtype == "float16" else 1e30 if "64" not in dtype else 1e18
    arrays = [jax_array(x, jax.devices()[0]) for x in batch]
    summed, info = per_example_clip(arrays, 2.0, **options)
    expected, known = per_example_clip(batch, 2.0, **options)
    for ours, exact in zip(
        [*summed, *jax.tree.leaves(info.norms)], [*expected, *jax.tree.leaves(known.norms)], strict=True
    ):
        assert (ours.dtype, ours.committed) == (exact.dtype, True)
        assert bits(ours) == bits(exact)
    assert jax.tree.leaves(info.num_clipped)[0].dtype == "int32"
    assert jax.tree.map(int, info.num_clipped) == jax.tree.map(int, known.num_clipped)


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "zero", "drop"])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
@pytest.mark.parametrize("threshold", [0.5, 1e300])
def test_mixed_gradients_in_place_stay_what_they_are(nonfinite, bad, threshold):
    wide = np.array([3e200, 4.0, 1.0])
    wide[2] = 1.0 if bad is None else bad
    numbers = [wide, np.array([1, 2], np.float32), np.array([0.5, 0.25])]
    alone = [SimpleNamespace(grad=x.copy()) for x in numbers]
    mixed = [SimpleNamespace(grad=x) for x in (wide.copy(), jax_array(numbers[1]), jax_array(numbers[2]))]
    first, single, double = (p.grad for p in mixed)
    if bad is not None and nonfinite == "raise":
        with pytest.raises(FloatingPointError):
            clip_grad_norm_(mixed, threshold, nonfinite=nonfinite)
        assert [p.grad for p in mixed] == [first, single, double]
        assert bits(first) == bits(wide)
        return
    norm = clip_grad_norm_(mixed, threshold, nonfinite=nonfinite)
    expected = clip_grad_norm_(alone, threshold, nonfinite=nonfinite)
    assert bits(norm) == bits(expected)
    assert mixed[0].grad is first
    assert [p.grad.dtype for p in mixed] == ["float64", "float32", "float64"]
    assert [bits(p.grad) for p in mixed] == [bits(p.grad) for p in alone]
    assert [bits(single), bits(double)] == [bits(numbers[1]), bits(numbers[2])]


def test_other_calls_in_place_keep_mixed_gradients():
    for call in (lambda ps: clip_grad_value_(ps, 1.0), lambda ps: clip_grads_with_norm_(ps, 1.0, 4e200)):
        for first in (np.array([3e200, -2.0, 0.1]), np.array([3e200, 2.0], ">f8")):
            alone = [SimpleNamespace(grad=first.copy()), SimpleNamespace(grad=np.array([5e199, 0.2]))]
            mixed = [SimpleNamespace(grad=first.copy()), SimpleNamespace(grad=jax_array(alone[1].grad))]
            kept = mixed[0].grad
            call(alone)
            call(mixed)
            assert mixed[0].grad is kept
            assert isinstance(mixed[1].grad, jax.Array)
            assert [bits(p.grad) for p in mixed] == [bits(p.grad) for p in alone]


def test_read_only_gradients_are_replaced_by_arrays_of_their_kind():
    first = np.array([3e200, 4.0])
    first.flags.writeable = False
    mixed = [SimpleNamespace(grad=first), SimpleNamespace(grad=jnp.ones(2))]
    clip_grad_norm_(mixed, 1.0)
    assert isinstance(mixed[0].grad, np.ndarray)
    assert (mixed[0].grad.dtype, float(first[0])) == ("float64", 3e200)
    assert 1 - 1e-5 < float(mixed[0].grad[0]) <= 1


def test_leaves_of_mixed_trees_stay_what_they_are():
    tree = {"numpy": np.array([3e200, 4.0]), "jax": jnp.ones(2), "scalar": np.float64(1.0)}
    for name, function in FUNCTIONAL.items():
        if name != "prefix":
            for threshold in THRESHOLDS:
                clipped = function(tree, threshold)
                assert {key: type(x) for key, x in clipped.items()} == {key: type(x) for key, x in tree.items()}
                assert {key: x.dtype for key, x in clipped.items()} == {key: x.dtype for key, x in tree.items()}


@pytest.mark.parametrize("name", ["global", "layer"])
def test_thresholds_and_masks_of_jax_leave_numpy_as_it_is(name):
    tree = [np.array([3e200, 4.0]), np.array([1.0])]
    results = FUNCTIONAL[name](tree, jnp.float32(1.0))
    assert [type(x) for x in results] == [np.ndarray] * 2
    assert [bits(x) for x in results] == [bits(x) for x in FUNCTIONAL[name](tree, 1.0)]
    summed, info = per_example_clip(
        np.array([[3e200, 4.0], [1.0, 0.0]]), jnp.float32(1.0), mask=jnp.array([True, False])
    )
    assert summed.tolist() == pytest.approx([1.0, 4 / 3e200], rel=1e-14)
    assert info.norms.dtype == "float64"


WEAK = {
    "scalar": lambda: jnp.asarray(2.5),
    "vector": lambda: jnp.broadcast_to(jnp.asarray(2.5), (3,)),
    "large": lambda: jnp.broadcast_to(jnp.asarray(2.5), (LARGE,)),
    "strong": lambda: jnp.full(3, 2.5, jnp.float32),
}


def weak_tree():
    tree = {key: make() for key, make in WEAK.items()}
    assert {key: x.weak_type for key, x in tree.items()} == {key: key != "strong" for key in WEAK}
    return tree


def by_name(name, threshold):
    if name == "prefix":
        return lambda tree: clip_by_layer_norm(tree, dict.fromkeys(tree, threshold))[0]
    return lambda tree: FUNCTIONAL[name](tree, threshold)


def assert_weak_as_before(results):
    assert {key: x.weak_type for key, x in results.items()} == {key: key != "strong" for key in results}
    assert {str(x.dtype) for x in results.values()} == {"float32"}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_weak_types_stay_weak(name):
    for threshold in THRESHOLDS:
        assert_weak_as_before(by_name(name, threshold)(weak_tree()))
    if name not in ("raise", "parts"):
        tree = {key: x for key, x in weak_tree().items() if key != "large"}
        assert_weak_as_before(jax.jit(by_name(name, 0.5))(tree))


@pytest.mark.parametrize("name", ["global", "value"])
def test_weak_types_have_derivatives(name):
    tree = {key: x for key, x in weak_tree().items() if key in ("scalar", "strong")}
    results, pull = jax.vjp(by_name(name, 0.5), tree)
    assert_weak_as_before(results)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(pull(results)))
    results, changes = jax.jvp(by_name(name, 0.5), (tree,), (tree,))
    assert_weak_as_before(results)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(changes))


def test_numbers_in_a_tree_of_jax_are_weak_and_take_part():
    for threshold in (1.0, 10.0):
        clipped, norm = clip_by_global_norm({"w": jnp.array([3.0]), "b": 4.0, "n": 0}, threshold)
        assert (float(norm), norm.weak_type) == (5.0, False)
        assert clipped.pop("n") == 0  # integers come back as they are
        assert {key: x.weak_type for key, x in clipped.items()} == {"w": False, "b": True}


def test_weak_gradients_in_place_stay_weak():
    for call in (lambda p: clip_grad_norm_(p, 1.0), lambda p: clip_grad_value_(p, 1.0)):
        parameter = SimpleNamespace(grad=jnp.broadcast_to(jnp.asarray(2.5), (3,)))
        call(parameter)
        assert parameter.grad.weak_type
        assert float(parameter.grad[0]) <= 1
