"""What exported programs compute in place of the kernels: the same numbers, within the error proven for both."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from frameworks import DTYPES, numpy_dtype
from fresh_process import run
from gradclip.backends.jax import exported, kernels
from gradclip.backends.sums import ENOUGH, kernels_sum_error
from gradclip.core.arrays import Arrays
from rational import at_most, power_of_norm

SIZES = (1, 31, 32, 65, 1000, 65537)
NARROW = tuple(dtype for dtype in DTYPES if dtype not in ("float64", "complex128"))


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def drawn(dtype, size, low=-3.0, high=3.0):
    rng = np.random.default_rng(size)
    values = rng.choice([-1.0, 1.0], size) * 10.0 ** rng.uniform(low, high, size)
    return (values + 1j * rng.permutation(values) if "complex" in dtype else values).astype(numpy_dtype(dtype))


def power_sums(arrays, p, enough, rows=()):
    return jax.jit(lambda *arrays: exported.power_sums(arrays, rows, p, enough))(*map(jnp.asarray, arrays))


def of_kernels(arrays, p, enough, rows):
    return jax.jit(lambda *arrays: kernels.power_sums(arrays, p, enough, rows))(*arrays)


def extremes(arrays, rows=()):
    return jax.jit(lambda *arrays: exported.extremes(arrays, rows))(*map(jnp.asarray, arrays))


def relative_error(found, exact):
    return float(abs(Fraction(float(found)) - exact) / exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_sums_are_as_exact_as_those_of_the_kernels(dtype, p):
    if p != 2 and "complex" in dtype:
        dtype = dtype.replace("complex64", "float32").replace("complex128", "float64")
    for given in ([drawn(dtype, 33)], [drawn(dtype, 1), drawn(dtype, 2)], [drawn(dtype, size) for size in SIZES]):
        error = kernels_sum_error(sum(map(len, given)), Arrays([jnp.zeros(1)]), p) + (16 + 4096 * (p > 2)) * 2.0**-53
        assert relative_error(power_sums(given, float(p), -1.0)[0], power_of_norm(given, p)) <= error


@pytest.mark.parametrize("size", [33, 1000, 65537, 1 << 20])
def test_no_term_is_lost_beside_a_large_sum(size):
    x = np.full(size, 2.0**-27, np.float32)
    x[0] = 1.0
    error = kernels_sum_error(size, Arrays([jnp.zeros(1)]), 2) + 16 * 2.0**-53
    exact = 1 + (size - 1) * Fraction(1, 2**54)
    assert relative_error(power_sums([x], 2.0, -1.0)[0], exact) <= error
    assert (
        relative_error(power_sums([x[i : i + 1] for i in range(100)], 2.0, -1.0)[0], 1 + 99 * Fraction(1, 2**54))
        <= error
    )


def test_a_running_sum_would_lose_them():
    assert relative_error(np.add.accumulate([1.0] + [2.0**-54] * 65536)[-1], 1 + Fraction(1, 2**38)) > 2.0**-40


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_subnormal_numbers_count(dtype):
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x = jnp.asarray(np.array([3 * tiny, 4 * tiny] * 40).astype(numpy_dtype(dtype)))
    assert float(power_sums([x], 2.0, -1.0)[0]) == 40 * (5 * tiny) ** 2
    assert float(power_sums([x], 1.0, -1.0)[0]) == 40 * 7 * tiny
    assert list(map(float, jax.jit(lambda x: exported.extremes([x], ()))(x))) == [4 * tiny, 3 * tiny]


@pytest.mark.parametrize("scale", [1e-307, 1e-200, 1.0, 1e200, 1.7e308])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_powers_beyond_the_range_are_divided_first(dtype, scale):
    x = np.array([0.6, -0.8, 0.0] * 30).astype(dtype) * scale
    for p, enough in ((1.0, ENOUGH), (2.0, ENOUGH), (3.0, math.inf)):
        total, divisor = power_sums([x], p, enough)
        exact = power_of_norm([x.real], int(p))
        assert relative_error(total, exact / Fraction(float(divisor)) ** int(p)) < 1e-13
        assert float(divisor) in (1.0, min(0.8 * scale, 2.0**1022))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("enough", [-1.0, ENOUGH, math.inf])
def test_what_is_not_finite_stays_so(value, enough):
    x = np.array([1.0, value, 2.0])
    total, divisor = power_sums([np.ones(40), x], 2.0, enough)
    assert not np.isfinite(total)
    assert divisor == 1.0
    largest, smallest = exported.extremes([jnp.asarray(x)], ())
    np.testing.assert_equal([float(largest), float(smallest)], [value, math.nan])


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_has_the_numbers_of_the_kernels(dtype):
    arrays = [jnp.asarray(drawn(dtype, 4 * n)).reshape(4, n) for n in (3, 70)] + [jnp.asarray(drawn(dtype, 5))[None]]
    for found, expected in (
        (power_sums(arrays, 2.0, ENOUGH, (4,)), of_kernels(arrays, 2.0, ENOUGH, (4,))),
        (power_sums(arrays, 3.0, math.inf, (4,)), of_kernels(arrays, 3.0, math.inf, (4,))),
        (extremes(arrays, (4,)), jax.jit(lambda *arrays: kernels.extremes(arrays, (4,)))(*arrays)),
    ):
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=2e-7 if "16" in dtype else 1e-14)
        assert found[0].shape == found[1].shape == (4,)


def test_arrays_without_elements_add_nothing():
    empty = jnp.zeros((0, 3))
    assert power_sums([empty, jnp.array([3.0, 4.0])], 2.0, -1.0)[0] == 25.0
    assert exported.extremes([empty, jnp.array([3.0, 4.0])], ()) == (4.0, 3.0)


@pytest.mark.parametrize("dtype", NARROW)
def test_examples_are_added_as_by_the_kernels(dtype):
    batch = [jnp.asarray(drawn(dtype, 5 * n)).reshape(5, n) for n in (3, 70)]
    batch[0] = batch[0].at[3, 1].set(math.inf)
    included = jnp.array([0.0, 0.0, math.nan, 0.0, 0.0])
    weighing = jnp.array([1.0 + 1e-14, 0.0, 500.0, 1.0, 500.0])
    columns = 73 * (2 if "complex" in dtype else 1)
    expected = kernels.add_examples(batch, weighing, included, columns)
    added = jax.jit(lambda *arrays: exported.add_examples(arrays, (5,)))(weighing, included, *batch)
    for found, one in zip(added, expected, strict=True):
        finite = np.isfinite(one)
        assert np.array_equal(finite, np.isfinite(found))
        np.testing.assert_allclose(np.array(found)[finite], np.array(one)[finite], rtol=1e-12, atol=1e-9)


def test_entries_are_those_of_each_vector_in_order():
    vectors = [jnp.array([1.0, 2.0]), jnp.array([True])]
    assert [float(x) for x in exported.entries(vectors, ())] == [1.0, 2.0, 1.0]
    assert [x.tolist() for x in exported.entries([jnp.eye(2)], (2,))] == [[1.0, 0.0], [0.0, 1.0]]


TREE = {"a": jnp.asarray(drawn("float32", 70).reshape(7, 10)), "b": jnp.asarray(drawn("bfloat16", 7), jnp.bfloat16)}
CALLS = {
    "norm": gradclip.global_norm,
    "order 3": lambda tree: gradclip.clip_by_global_norm(tree, 1.0, ord=3),
    "largest": lambda tree: gradclip.clip_by_global_norm(tree, 1.0, ord=math.inf),
    "tree": lambda tree: gradclip.clip_by_global_norm(tree, 1.0),
    "layers": lambda tree: gradclip.clip_by_layer_norm(tree, 1.0),
    "units": lambda tree: gradclip.clip_by_unit_norm(tree, 1.0),
    "examples": lambda tree: gradclip.per_example_clip(tree, 1.0),
    "many": lambda tree: jax.vmap(lambda one: gradclip.clip_by_global_norm(one, 1.0))(tree),
    "many batches": lambda tree: jax.vmap(lambda one: gradclip.per_example_clip({"a": one["a"][None]}, 1.0)[0])(tree),
    "gradient": jax.grad(lambda tree: gradclip.global_norm(gradclip.clip_by_global_norm(tree, 1.0)[0]["a"])),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bits", [32, 64])
def test_programs_are_exported_to_a_file_and_back(name, bits):
    with jax.enable_x64(bits == 64):
        call = jax.jit(CALLS[name])
        expected = call(TREE)
        assert "custom_call @gradclip" in call.lower(TREE).as_text()
        written = jax.export.export(call)(TREE).serialize() if name != "gradient" else None
        found = jax.export.deserialize(written).call(TREE) if written else jax.export.export(call)(TREE).call(TREE)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-2 if one.dtype == jnp.bfloat16 else 1e-6)


def test_named_tuples_are_exported_to_a_file_and_back():
    follow, private = gradclip.QuantileThreshold(window=3), gradclip.PrivateQuantile()
    summed = gradclip.clipped_grad(lambda w, x: (x * w).sum(), 1.0, return_norms=True)
    like = jnp.zeros(())
    calls = [
        (follow.observe, (follow.init(like), jnp.array(5.0))),
        (private.observe_fraction, (private.init(like), jnp.array(0.25))),
        (summed, (jnp.zeros(2), jnp.array([[3.0, 4.0]]))),
    ]
    for call, arguments in calls:
        call = jax.jit(call)
        found = jax.export.deserialize(jax.export.export(call)(*arguments).serialize()).call(*arguments)
        assert jax.tree.structure(found) == jax.tree.structure(call(*arguments))


def test_named_tuples_are_known_if_jax_is_imported_later(tmp_path):
    code = """
    import gradclip
    import jax
    rows = jax.numpy.array([[3.0, 4.0]])
    call = jax.jit(lambda rows: gradclip.per_example_clip(rows, 1.0)[1])
    written = jax.export.export(call)(rows).serialize()
    print(jax.export.deserialize(written).call(rows).num_clipped)
    """
    assert run(code, tmp_path) == "1"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_holds_in_exported_programs(dtype):
    for size in (3, 33, 2000):
        x = jnp.asarray(drawn(dtype, size))
        clipped, _ = jax.export.export(jax.jit(lambda x: gradclip.clip_by_global_norm(x, 0.7)))(x).call(x)
        assert at_most([clipped], 2, 0.7)
        assert not at_most([clipped], 2, 0.7 * (0.99 if "16" in dtype else 1 - 1e-5))


def test_programs_for_other_devices_have_no_call_of_a_kernel():
    call = jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, 1.0))
    assert "gradclip" not in call.trace(TREE).lower(lowering_platforms=("cuda",)).as_text()
    everywhere = jax.export.export(call, platforms=("cpu", "cuda", "tpu"))(TREE)
    np.testing.assert_allclose(everywhere.call(TREE)[1], call(TREE)[1], rtol=1e-6)
