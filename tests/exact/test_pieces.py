"""Sparse gradients whose rows come in several pieces, in every framework that has them, against exact sums."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from jax.experimental import sparse

import gradclip
import gradclip._src.backends.torch.framework as torch_backend
from frameworks import numpy_dtype

pytestmark = pytest.mark.xdist_group("tensorflow")
DTYPES = ("float16", "bfloat16", "float32", "float64")
TIGHT = {"float16": 0.99, "bfloat16": 0.98, "float32": 1 - 1e-5, "float64": 1 - 1e-5}


def clip(tree, c):
    return gradclip.clip_by_global_norm(tree, c)


def in_tensorflow(compile):
    def run(values, rows, *thresholds):
        call = compile(lambda v: [clip(tf.IndexedSlices(v, tf.constant(rows)), c) for c in thresholds])
        return [
            (result.values.numpy(), result.indices.numpy(), float(norm)) for result, norm in call(tf.constant(values))
        ]

    return run


def in_jax(jit):
    def run(values, rows, *thresholds):
        with jax.enable_x64(values.dtype == np.float64):
            array = sparse.BCOO((jnp.asarray(values), jnp.asarray(rows[:, None])), shape=(9, values.shape[1]))
            call = lambda x: [clip(x, c) for c in thresholds]
            return [
                (np.asarray(result.data), np.asarray(result.indices)[:, 0], float(norm))
                for result, norm in (jax.jit(call) if jit else call)(array)
            ]

    return run


def tensor(values):
    half = values.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(values)


def entries(result):
    found = result._values()
    numbers = found.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if found.dtype == torch.bfloat16 else found
    return np.asarray(numbers), result._indices()[0].numpy()


def each(function):
    """Return a function of several thresholds."""
    return lambda values, rows, *thresholds: [function(values, rows, c) for c in thresholds]


def in_torch(values, rows, c):
    given = torch.sparse_coo_tensor(
        torch.from_numpy(rows)[None], tensor(values), (9, values.shape[1]), check_invariants=True
    )
    result, norm = clip(given, c)
    return *entries(result), float(norm)


def in_torch_in_place(values, rows, c):
    parameter = torch.nn.Parameter(torch.zeros(9, values.shape[1], dtype=tensor(values).dtype))
    parameter.grad = torch.sparse_coo_tensor(
        torch.from_numpy(rows)[None], tensor(values), parameter.shape, check_invariants=True
    )
    norm = gradclip.clip_grad_norm_([parameter], c)
    return *entries(parameter.grad), float(norm)


def in_torch_on_a_device(values, rows, c):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "in_host_memory", lambda *_: False)
        return in_torch(values, rows, c)


WAYS = {
    "tensorflow": in_tensorflow(lambda f: f),
    "tensorflow graph": in_tensorflow(tf.function),
    "tensorflow xla": in_tensorflow(lambda f: tf.function(f, jit_compile=True)),
    "jax": in_jax(jit=False),
    "jax jit": in_jax(jit=True),
    "torch": each(in_torch),
    "torch in place": each(in_torch_in_place),
    "torch device": each(in_torch_on_a_device),
}
"""Of a sparse gradient and thresholds, known ones: for each the numbers, their rows and the norm."""
ALL_WAYS = pytest.mark.parametrize("way", WAYS)


def squared_norm(values, rows):
    """Return the exact square of the norm of the sums of the pieces."""
    sums = {}
    for row, piece in zip(rows.tolist(), values.astype(float).tolist(), strict=True):
        for column, number in enumerate(piece):
            sums[row, column] = sums.get((row, column), Fraction(0)) + Fraction(number)
    return sum(number * number for number in sums.values())


@ALL_WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_that_need_no_clipping_stay_and_others_are_bounded_exactly(way, dtype):
    rng = np.random.default_rng([DTYPES.index(dtype), len(way)])
    values = rng.normal(size=(7, 2)).astype(numpy_dtype(dtype))
    rows = np.array([5, 1, 5, 0, 1, 5, 8])
    exact = math.sqrt(squared_norm(values, rows))
    c = 0.3 * exact
    (same, same_rows, norm), (*clipped, _) = WAYS[way](values, rows, 1.01 * exact, c)
    assert same.tobytes() == values.tobytes()
    assert same_rows.tolist() == rows.tolist()
    assert norm == pytest.approx(exact, rel=1e-14 if dtype == "float64" else 1e-6)
    assert (Fraction(c) * Fraction(TIGHT[dtype])) ** 2 <= squared_norm(*clipped) <= Fraction(c) ** 2


@ALL_WAYS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_thousands_of_pieces_lose_nothing(way, dtype):
    count = 7001  # odd, so that float16 and bfloat16 do not have it
    values = np.full((count, 1), 0.1).astype(numpy_dtype(dtype))
    exact = count * float(values[0, 0])
    ((clipped, rows, norm),) = WAYS[way](values, np.full(count, 3), 1.0)
    assert norm == pytest.approx(exact, rel=2e-7)
    assert 0.99 <= math.sqrt(squared_norm(clipped, rows)) <= 1.0


@ALL_WAYS
def test_sums_beyond_half_precision_are_finite(way):
    values, rows = np.full((3, 1), 6e4, np.float16), np.array([2, 2, 2])
    exact = 3 * float(values[0, 0])
    (same, _, norm), *clipped, (*most, _) = WAYS[way](values, rows, 2e5, 100.0, 6e4, 1e5)
    assert same.tobytes() == values.tobytes()
    assert norm == exact
    for c, (*found, _) in zip((100.0, 6e4), clipped, strict=True):
        assert 0.99 * c <= math.sqrt(squared_norm(*found)) <= c
    # One element cannot hold so much.
    assert squared_norm(*most) == 65504**2


@ALL_WAYS
def test_pieces_that_are_not_finite_spread(way):
    for pieces in ([[math.inf], [-math.inf], [1.0]], [[math.nan], [2.0], [1.0]]):
        values = np.array(pieces, np.float32)
        assert np.isnan(WAYS[way](values, np.array([1, 1, 0]), 1e9)[0][0]).all()
