"""Sparse arrays of JAX: clipped as the dense arrays that they stand for, and as sparse afterwards."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from gradclip import (
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    global_norm,
    layer_norms,
    partial_norm,
    per_example_clip,
)
from gradclip.integrations import brainstate, jax_privacy, optax

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
# Three elements of a 4 x 3 array in six pieces, two of them outside of it.
INDICES = [[0, 1], [2, 2], [0, 1], [4, 0], [3, 0], [1, 3]]
PIECES = [1.0, -4.0, 2.0, 100.0, 12.0, math.nan]


def pieces(dtype="float32", indices=INDICES, values=PIECES, shape=(4, 3)):
    with jax.enable_x64(True):
        data = jnp.array(np.array(values).astype(jnp.dtype(dtype)))
    return sparse.BCOO((data, jnp.array(indices, jnp.int32)), shape=shape)


def rows():
    """Return rows of an embedding that were looked up, one of them twice."""
    values = np.array([[1.0, 2.0], [0.5, -0.5], [2.0, 2.0]], np.float32)
    return sparse.BCOO((jnp.array(values), jnp.array([[3], [0], [3]])), shape=(5, 2))


def batches():
    data = jnp.array([[3.0, 3.0, 1.0], [2.0, 5.0, 9.0]])
    return sparse.BCOO((data, jnp.array([[[0], [0], [2]], [[1], [0], [7]]])), shape=(2, 4))


def compressed():
    return sparse.BCSR((jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 0]), jnp.array([0, 2, 3])), shape=(2, 3))


def dense(tree):
    is_sparse = lambda x: isinstance(x, sparse.JAXSparse)
    numbers = jax.tree.map(lambda x: np.asarray(x.todense() if is_sparse(x) else x), tree, is_leaf=is_sparse)
    return jax.tree.map(lambda x: x.astype(complex) if x.dtype.kind == "c" else x.astype(float), numbers)


MADE = {
    "pieces": pieces,
    "rows": rows,
    "batches": batches,
    "compressed": compressed,
    "unique": lambda: sparse.BCOO.fromdense(jnp.array([[0.0, 3.0], [4.0, 0.0]])),
    "padded": lambda: sparse.BCOO.fromdense(jnp.array([[0.0, 3.0], [4.0, 0.0]]), nse=4),
    "without sparse axes": lambda: sparse.BCOO((jnp.array([1.0, 2.0]), jnp.zeros((2, 0), int)), shape=()),
    "nothing": lambda: sparse.BCOO((jnp.zeros(0), jnp.zeros((0, 2), int)), shape=(2, 2)),
}
FUNCTIONAL = {
    "global": lambda tree, c: clip_by_global_norm(tree, c)[0],
    "layer": lambda tree, c: clip_by_layer_norm(tree, c)[0],
    "prefix": lambda tree, c: clip_by_layer_norm(tree, {"w": c, "b": c})[0],
    "value": clip_by_value,
    "parts": lambda tree, c: partial_norm(tree).clip(tree, c),
    "optax": lambda tree, c: optax.clip_by_global_norm(c).update(tree, None)[0],
    "optax blocks": lambda tree, c: optax.clip_by_block_rms(c).update(tree, None)[0],
    "brainstate": lambda tree, c: brainstate.clip_grad_norm(tree, c),
    "jax_privacy": lambda tree, c: jax_privacy.clip_pytree(tree, c)[0],
}


def assert_as_sparse(result, leaf):
    assert type(result) is type(leaf)
    assert (result.shape, result.dtype, result.data.shape) == (leaf.shape, leaf.dtype, leaf.data.shape)
    before, after = jax.tree.leaves(leaf)[1:], jax.tree.leaves(result)[1:]
    assert [x.dtype for x in before] == [x.dtype for x in after]
    assert [x.tolist() for x in before] == [x.tolist() for x in after]
    assert (result.indices_sorted, result.unique_indices) == (leaf.indices_sorted, leaf.unique_indices)


CASES = [
    *(("global", made, False) for made in MADE),
    *(("global", made, True) for made in ("pieces", "batches", "compressed")),
    *((name, "pieces", False) for name in FUNCTIONAL if name != "global"),
    ("value", "rows", True),
]


@pytest.mark.parametrize(("name", "made", "jit"), CASES)
def test_sparse_arrays_are_clipped_as_dense_ones(name, made, jit):
    leaf = MADE[made]()
    tree = {"w": leaf, "b": jnp.array([0.5, -2.0])}
    clip = lambda tree: [FUNCTIONAL[name](tree, threshold) for threshold in (0.25, 1e6)]
    results = (jax.jit(clip) if jit else clip)(tree)
    concrete = name == "parts"
    expected = (clip if concrete else jax.jit(clip))(jax.tree.map(np.float32, dense(tree)))
    for result, of_dense in zip(results, expected, strict=True):
        assert_as_sparse(result["w"], leaf)
        for ours, theirs in zip(jax.tree.leaves(dense(result)), jax.tree.leaves(of_dense), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_count_each_element_once(dtype):
    array = pieces(dtype)
    for norm in (global_norm(array), layer_norms({"w": array})["w"], clip_by_global_norm([array], 1.0)[1]):
        assert norm.shape == ()
        assert float(norm) == 13.0
    assert float(global_norm(array, ord=1)) == 19.0
    assert float(global_norm(array, ord="inf")) == 12.0
    assert partial_norm(array).norm == 13.0
    clipped, _ = clip_by_global_norm(array, 6.5)
    assert clipped.dtype == dtype
    exact = np.asarray(clipped.data).astype(complex)
    assert exact[[2, 3, 5]].tolist() == [0, 0, 0]
    assert 6.5 * 0.99 < math.sqrt(math.fsum(np.abs(exact) ** 2)) <= 6.5


def test_what_is_in_one_piece_and_not_clipped_stays_bit_for_bit():
    values = np.array([3.0, -0.0, 1e-45, 4.0], np.float32)
    array = pieces(indices=[[3, 0], [0, 0], [2, 1], [1, 1]], values=values)
    clipped, _ = clip_by_global_norm(array, 5.1)
    assert np.asarray(clipped.data).tobytes() == values.tobytes()


def test_wide_elements_keep_dtype_and_range():
    clipped, norm = clip_by_global_norm(pieces("float64", [[0, 0], [0, 0], [1, 1]], [1e200, 2e200, 4e200]), 5.0)
    assert (norm.dtype, clipped.data.dtype) == ("float64", "float64")
    assert float(norm) == pytest.approx(5e200, rel=1e-14)
    assert np.asarray(clipped.data).tolist() == pytest.approx([3.0, 0.0, 4.0], rel=1e-14)


def test_gradients_pass_through():
    def length(data):
        array = sparse.BCOO((data, jnp.array(INDICES)), shape=(4, 3))
        return clip_by_global_norm(array, 6.5)[0].todense().sum()

    def of_dense(data):
        array = (
            jnp.zeros((4, 3)).at[jnp.array([0, 2, 0, 3]), jnp.array([1, 2, 1, 0])].add(data[jnp.array([0, 1, 2, 4])])
        )
        return clip_by_global_norm(array, 6.5)[0].sum()

    data = jnp.array([1.0, -4.0, 2.0, 0.0, 12.0, 0.0])
    ours, theirs = (jax.jit(jax.grad(function))(data) for function in (length, of_dense))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_vmap_over_sparse_arrays():
    stacked = jax.vmap(lambda data: clip_by_global_norm(sparse.BCOO((data, jnp.array(INDICES)), shape=(4, 3)), 6.5)[1])
    norms = jax.jit(stacked)(jnp.array([PIECES, [0.0, 0.0, 3.0, 9.0, 4.0, 9.0]]))
    assert norms.tolist() == [13.0, 5.0]


def test_nonfinite_elements_are_named():
    with pytest.raises(FloatingPointError, match=r"\['w'\]: 1 NaN"):
        clip_by_global_norm({"w": pieces(values=[1.0, math.nan, 0, 0, 0, 0])}, 1.0, nonfinite="raise")


def test_other_formats_and_examples_are_refused():
    csr = sparse.CSR.fromdense(jnp.eye(2))
    for call in (global_norm, lambda tree: clip_by_value(tree, 1.0), lambda tree: clip_by_global_norm(tree, 1.0)):
        with pytest.raises(TypeError, match="must be BCOO or BCSR, got CSR"):
            call({"w": csr})
    with pytest.raises(TypeError, match=r"must be dense, got BCOO at \['w'\]"):
        per_example_clip({"w": batches(), "b": jnp.ones((2, 3))}, 1.0)
