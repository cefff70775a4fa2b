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
from gradclip._src.backends.jax import exported, kernels
from gradclip._src.backends.sums import ENOUGH, kernels_sum_error
from gradclip._src.core.arrays import Arrays
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
    return jax.jit(lambda *arrays: exported.power_sums(arrays, rows, p, enough))(*arrays)


def relative_error(found, exact):
    return float(abs(Fraction(float(found)) - exact) / exact)


# A complex magnitude is no rational number, so that only squares of complex numbers have exact sums.
@pytest.mark.parametrize("sizes", [(33,), (1, 2), SIZES], ids=str)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_sums_are_as_exact_as_those_of_the_kernels(p, sizes):
    terms = [[drawn(dtype, size) for size in sizes] for dtype in DTYPES if p == 2 or "complex" not in dtype]
    found = jax.jit(lambda terms: [exported.power_sums(arrays, (), float(p), -1.0)[0] for arrays in terms])(terms)
    for total, arrays in zip(found, terms, strict=True):
        error = kernels_sum_error(sum(map(len, arrays)), Arrays([np.zeros(1)]), p) + (16 + 4096 * (p > 2)) * 2.0**-53
        assert relative_error(total, power_of_norm(arrays, p)) <= error


@pytest.mark.parametrize("size", [33, 1000, 65537, 1 << 20])
def test_no_term_is_lost_beside_a_large_sum(size):
    x = np.full(size, 2.0**-27, np.float32)
    x[0] = 1.0
    error = kernels_sum_error(size, Arrays([x]), 2) + 16 * 2.0**-53
    assert relative_error(power_sums([x], 2.0, -1.0)[0], 1 + (size - 1) * Fraction(1, 2**54)) <= error


def test_no_array_is_lost_beside_a_large_one():
    arrays = [np.ones(1, np.float32), *[np.full(1, 2.0**-27, np.float32)] * 99]
    error = kernels_sum_error(len(arrays), Arrays(arrays), 2) + 16 * 2.0**-53
    assert relative_error(power_sums(arrays, 2.0, -1.0)[0], 1 + 99 * Fraction(1, 2**54)) <= error


def test_a_running_sum_would_lose_them():
    assert relative_error(np.add.accumulate([1.0] + [2.0**-54] * 65536)[-1], 1 + Fraction(1, 2**38)) > 2.0**-40


@jax.jit
def sums_and_extremes(x):
    totals = [exported.power_sums([x], (), p, -1.0)[0] for p in (1.0, 2.0)]
    return *totals, *exported.extremes([x], ())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_subnormal_numbers_count(dtype):
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x = np.array([3 * tiny, 4 * tiny] * 40).astype(numpy_dtype(dtype))
    assert list(map(float, sums_and_extremes(x))) == [40 * 7 * tiny, 40 * (5 * tiny) ** 2, 4 * tiny, 3 * tiny]


@jax.jit
def sums_in_the_range(x):
    return {p: exported.power_sums([x], (), float(p), ENOUGH if p < 3 else math.inf) for p in (1, 2, 3)}


@pytest.mark.parametrize("scale", [1e-307, 1e-200, 1.0, 1e200, 1.7e308])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_powers_beyond_the_range_are_divided_first(dtype, scale):
    x = np.array([0.6, -0.8, 0.0] * 30).astype(dtype) * scale
    for p, (total, divisor) in sums_in_the_range(x).items():
        exact = power_of_norm([x.real], p)
        assert relative_error(total, exact / Fraction(float(divisor)) ** p) < 1e-13
        assert float(divisor) in (1.0, min(0.8 * scale, 2.0**1022))


@jax.jit
def squares_and_extremes(ones, x):
    found = [exported.power_sums([ones, x], (), 2.0, enough) for enough in (-1.0, ENOUGH, math.inf)]
    return found, exported.extremes([x], ())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(value):
    found, extremes = squares_and_extremes(np.ones(40), np.array([1.0, value, 2.0]))
    for total, divisor in found:
        assert not np.isfinite(total)
        assert divisor == 1.0
    np.testing.assert_equal(list(map(float, extremes)), [value, math.nan])


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_has_the_numbers_of_the_kernels(dtype):
    def numbers(of, arrays):
        wide = of.power_sums(arrays, p=3.0, enough=math.inf, rows=(4,))
        return [of.power_sums(arrays, p=2.0, enough=ENOUGH, rows=(4,)), wide, of.extremes(arrays, (4,))]

    both = jax.jit(lambda *arrays: [numbers(of, arrays) for of in (exported, kernels)])
    found, expected = both(*(drawn(dtype, 4 * n).reshape(4, n) for n in (3, 70)), drawn(dtype, 5)[None])
    np.testing.assert_allclose(found, expected, rtol=2e-7 if "16" in dtype else 1e-14)
    assert np.shape(found) == (3, 2, 4)


def test_arrays_without_elements_add_nothing():
    total, _, *extremes = jax.jit(
        lambda *arrays: [*exported.power_sums(arrays, (), 2.0, -1.0), *exported.extremes(arrays, ())]
    )(np.zeros((0, 3)), np.array([3.0, 4.0]))
    assert total == 25.0
    assert extremes == [4.0, 3.0]


def test_examples_are_added_as_by_the_kernels():
    batches = [[drawn(dtype, 5 * n).reshape(5, n) for n in (3, 70)] for dtype in NARROW]
    for batch in batches:
        batch[0][3, 1] = math.inf
    included = np.array([0.0, 0.0, math.nan, 0.0, 0.0])
    weighing = np.array([1.0 + 1e-14, 0.0, 500.0, 1.0, 500.0])
    expected = [
        kernels.add_examples(batch, weighing, included, 73 * (2 if np.iscomplexobj(batch[0]) else 1))
        for batch in batches
    ]
    add = lambda batches: [exported.add_examples([weighing, included, *batch], (5,)) for batch in batches]
    for added, of_kernels in zip(jax.jit(add)(batches), expected, strict=True):
        for found, one in zip(added, of_kernels, strict=True):
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


@pytest.fixture(scope="module", params=[32, 64])
def found_and_expected(request):
    """Return what one program of all calls gives after it was exported, and what it gives before."""
    call = jax.jit(lambda tree: {name: function(tree) for name, function in CALLS.items()})
    with jax.enable_x64(request.param == 64):
        written = jax.export.export(call)(TREE).serialize()
        return jax.export.deserialize(written).call(TREE), call(TREE)


@pytest.mark.parametrize("name", CALLS)
def test_programs_are_exported_to_a_file_and_back(name, found_and_expected):
    assert "custom_call @gradclip" in jax.jit(CALLS[name]).lower(TREE).as_text()
    found, expected = found_and_expected
    for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected[name]), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-2 if one.dtype == jnp.bfloat16 else 1e-6)


def test_named_tuples_are_exported_to_a_file_and_back():
    follow, private = gradclip.QuantileRule(window=3), gradclip.PrivateQuantile()
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
    given = [drawn(dtype, size) for size in (3, 33, 2000)]
    clip = jax.jit(lambda given: [gradclip.clip_by_global_norm(x, 0.7)[0] for x in given])
    for clipped in jax.export.export(clip)(given).call(given):
        assert at_most([clipped], 2, 0.7)
        assert not at_most([clipped], 2, 0.7 * (0.99 if "16" in dtype else 1 - 1e-5))


def test_programs_for_other_devices_have_no_call_of_a_kernel():
    call = jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, 1.0))
    assert "gradclip" not in call.trace(TREE).lower(lowering_platforms=("cuda",)).as_text()
    everywhere = jax.export.export(call, platforms=("cpu", "cuda", "tpu"))(TREE)
    np.testing.assert_allclose(everywhere.call(TREE)[1], call(TREE)[1], rtol=1e-6)
