"""Batches added up by the kernels in one reading, beside the two readings that they save."""

import math

import numpy as np
import pytest

import gradclip
from gradclip._src.backends.host.backend import HOST
from gradclip._src.native import kernels
from host_arrays import DTYPES, IN_USE, VARIANTS, host_array, number, random_array


@pytest.fixture(autouse=True)
def variant_in_use():
    yield
    kernels.use_variant(IN_USE)


def batch_of(dtype, examples, shapes, seed=0):
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-3, 3, examples)
    leaves = []
    for i, shape in enumerate(shapes):
        flat = random_array(dtype, examples * math.prod(shape), seed=seed + i)
        values = number(flat).reshape(examples, -1) * scales[:, None]
        leaves.append(host_array(values, dtype).data.reshape(examples, *shape))
    return leaves


def in_two_readings(monkeypatch, *args, **options):
    with monkeypatch.context() as patched:
        patched.setattr(type(HOST), "add_examples", lambda *_, **__: None)
        return gradclip.per_example_clip(*args, **options)


def as_float(leaves, dtype):
    import ml_dtypes

    return [x.view(ml_dtypes.bfloat16) for x in leaves] if dtype == "bfloat16" else leaves


def assert_same(one, other, rtol):
    for a, b in zip(one[0], other[0], strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1e-30, float(np.abs(b).max(initial=0.0))))
    np.testing.assert_allclose(one[1].norms, other[1].norms, rtol=3e-7)
    assert one[1].num_clipped == other[1].num_clipped


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["clip", "normalize", "automatic"])
def test_as_in_two_readings(monkeypatch, variant, dtype, rule):
    kernels.use_variant(variant)
    leaves = as_float(batch_of(dtype, 70, [(7, 5), (), (33,)]), dtype)
    mask = np.arange(70) % 5 > 0
    rtol = 1e-12 if dtype in ("float64", "complex128") else 1e-6
    for options in ({}, {"mask": mask}):
        ours = gradclip.per_example_clip(leaves, 1.5, rule=rule, **options)
        assert_same(ours, in_two_readings(monkeypatch, leaves, 1.5, rule=rule, **options), rtol)


# Few columns, for groups of examples on threads of their own; more, each thread having some of the columns.
@pytest.mark.parametrize("columns", [30_000, 70_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_every_variant_and_number_of_threads(monkeypatch, dtype, columns):
    leaves = as_float(batch_of(dtype, 37, [(columns,), (1001,)]), dtype)
    results = set()
    for variant in VARIANTS:
        kernels.use_variant(variant)
        for threads in (1, 2, 3, 8):
            monkeypatch.setattr(type(HOST), "threads", lambda _, n=threads: n)
            summed, info = gradclip.per_example_clip(leaves, 1.0, sum_dtype="float64")
            results.add((*(x.tobytes() for x in summed), info.norms.tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize(("examples", "columns"), [(41, 40_000), (6, 2_200_000)])
def test_examples_of_many_elements(monkeypatch, examples, columns):
    leaves = batch_of("float32", examples, [(columns,), (5,), (70_001,)])
    leaves[0][1, 7] = math.nan
    mask = np.arange(examples) != 3
    results = set()
    for threads in (1, 3):
        monkeypatch.setattr(type(HOST), "threads", lambda _, n=threads: n)
        summed, info = gradclip.per_example_clip(leaves, 1.0, mask=mask)
        results.add(tuple(x.tobytes() for x in summed))
    assert len(results) == 1
    assert_same((summed, info), in_two_readings(monkeypatch, leaves, 1.0, mask=mask), 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_an_example_that_is_not_finite_adds_nothing(bad, dtype):
    leaves = batch_of(dtype, 9, [(40,)])
    without = gradclip.per_example_clip([np.delete(leaves[0], 4, axis=0)], 1.0)[0][0]
    leaves[0][4, 17] = bad
    np.testing.assert_allclose(gradclip.per_example_clip(leaves, 1.0)[0][0], without, rtol=1e-6)
    assert np.isnan(gradclip.per_example_clip(leaves, 1.0, nonfinite="propagate")[0][0]).all()
    with pytest.raises(FloatingPointError, match=r"1 infinite|1 NaN"):
        gradclip.per_example_clip(leaves, 1.0, nonfinite="raise")


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_squares_that_leave_the_range_are_taken_again(scale):
    rows = np.array([[3.0, 4.0], [0.3, 0.4]]) * scale
    summed, info = gradclip.per_example_clip(rows, 1.0 * scale)
    np.testing.assert_allclose(summed / scale, [0.9, 1.2], rtol=1e-14)
    np.testing.assert_allclose(info.norms / scale, [5.0, 0.5], rtol=1e-14)


@pytest.mark.parametrize("view", [np.asfortranarray, lambda x: x[::2], lambda x: x[:, ::-1]])
def test_batches_in_another_order_go_the_other_way(view):
    rows = view(np.arange(1.0, 49.0, dtype=np.float32).reshape(6, 8))
    ours, theirs = (gradclip.per_example_clip(x, 1.0)[0] for x in (rows, np.ascontiguousarray(rows)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_gradients_are_not_written_and_no_copy_is_made():
    import tracemalloc

    rows = np.random.default_rng(0).standard_normal((64, 50_000)).astype(np.float32)
    before = rows.copy()
    rows.flags.writeable = False
    tracemalloc.start()
    gradclip.per_example_clip(rows, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(rows, before)
    assert peak < 0.2 * rows.nbytes
