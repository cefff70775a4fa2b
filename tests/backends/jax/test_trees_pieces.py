import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import sparse

import gradclip
from gradclip._src.backends.jax.trees import pieces

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def with_data(data, indices=None):
    indices = np.zeros((len(data), 1), np.int32) if indices is None else np.array(indices)[:, None]
    return sparse.BCOO((jnp.asarray(data), jnp.asarray(indices)), shape=(4,))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("jit", [False, True])
def test_other_elements_are_rounded_toward_zero(dtype, jit):
    rng = np.random.default_rng(len(dtype))
    exact = (rng.normal(size=400) * np.exp2(rng.integers(-30, 13, 400))).astype(np.float32)
    array = with_data(np.zeros(400, HALVES[dtype]))
    call = lambda x: pieces(array, jnp.zeros_like(x), x)
    found = np.asarray((jax.jit(call) if jit else call)(exact))
    wide = np.abs(found.astype(np.float64))
    assert (wide <= np.abs(exact)).all()
    next_up = np.nextafter(np.abs(found), HALVES[dtype](np.inf)).astype(np.float64)
    assert (next_up > np.abs(exact)).all()


@pytest.mark.parametrize("indices", [[1, 1, 0], [3, 1, 0]])
def test_derivatives_pass_through_pieces_that_stay(indices):
    weights = jnp.array([1.0, 5.0, 2.0], jnp.bfloat16)

    def length(data):
        return (gradclip.clip_by_global_norm(with_data(data, indices), 100.0)[0].data * weights).sum()

    found = jax.grad(length)(jnp.array([1.0, 2.0, 4.0], jnp.bfloat16))
    assert found.astype(float).tolist() == [1.0, 5.0, 2.0]


def test_derivatives_pass_through_scaled_elements_in_half_precision():
    def length(data):
        return gradclip.clip_by_global_norm(with_data(data, [1, 1, 0]), 2.5)[0].data.astype(jnp.float32) @ jnp.arange(3)

    found = jax.jit(jax.grad(length))(jnp.array([1.0, 2.0, 4.0], jnp.float16))
    # (s, z) = (3, 4) has norm 5. The loss is twice the scaled z, which stands in the last place.
    expected = [-0.48, -0.48, 0.36]
    np.testing.assert_allclose(np.asarray(found, float), expected, rtol=0.01)


def test_compressed_rows_with_pieces_add_up():
    data = jnp.ones(5000, jnp.bfloat16)
    array = sparse.BCSR((data, jnp.zeros(5000, jnp.int32), jnp.array([0, 5000, 5000])), shape=(2, 3))
    assert float(gradclip.global_norm(array)) == 5000.0
