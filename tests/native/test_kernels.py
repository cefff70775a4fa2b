"""The kernels beside NumPy and beside themselves: same results, and the same bits however the work is shared out."""

import math
import threading
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import gradclip
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.host.laid import clamp_
from gradclip._src.core.formats import FLOAT64, format_named
from gradclip._src.core.layouts import TREE
from gradclip._src.core.rules import Coefficient, Factors
from gradclip._src.native import describe_buffers, kernels
from host_arrays import (
    DTYPES,
    IN_USE,
    VARIANTS,
    host_array,
    known,
    number,
    random_array,
    with_kernels,
    without_kernels,
)

CHUNK = 65536
REAL = DTYPES[:4]
# Elements that are worth four threads: computed with, or read (140 chunks where nothing else is said).
COMPUTED = 40 * CHUNK + 77
READ = {"float64": 70 * CHUNK + 77, "complex64": 70 * CHUNK + 77, "complex128": 35 * CHUNK + 77}
SEVERAL = [3 * CHUNK, 20 * CHUNK, 40 * CHUNK]
THREADS_AND_CUTS = ((1, []), (1, [CHUNK]), (2, SEVERAL), (3, []), (3, SEVERAL), (8, [CHUNK]), (8, SEVERAL))
SIZES = (0, 1, 2, 15, 16, 17, 1023, 1025, 65535, 65536, 65537, 3 * 65536 + 5)


@pytest.fixture(autouse=True)
def variant_in_use():
    yield
    kernels.use_variant(IN_USE)


def factors(first, second=1.0):
    single = Factors(np.float32(first), np.float32(second))
    return Coefficient(np.False_, np.False_, Factors(np.float64(first), np.float64(second)), single)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("p", "in_float"), [(1.0, False), (1.5, False), (2.0, False), (2.0, True), (3.0, False), (7.0, False)]
)
def test_same_bits_for_every_variant_number_of_threads_and_cut(dtype, p, in_float):
    computed = p not in (1.0, 2.0) or (p == 1.0 and "complex" in dtype)
    whole = random_array(dtype, COMPUTED if computed else READ.get(dtype, 140 * CHUNK + 77))
    results = set()
    for variant in VARIANTS:
        kernels.use_variant(variant)
        for threads, cuts in THREADS_AND_CUTS:
            pieces = [HostArray(piece, dtype) for piece in np.split(whole.data, cuts)]
            results.add(known(pieces).sum(p, 1.0, in_float, threads))
    assert len(results) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("second", [1.0, 2.0**-3])
def test_scaling_gives_the_same_bits_for_every_variant_and_number_of_threads(dtype, second):
    x = random_array(dtype, READ.get(dtype, 140 * CHUNK + 77))
    results = set()
    for variant in VARIANTS:
        kernels.use_variant(variant)
        for threads in (1, 3):
            for source in (None, x):
                y = x.copy()
                known([source or y]).scale(known([y]), (0.3, second), (np.float32(0.3), second), threads)
                results.add(y.data.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_extremes_and_clamping_give_the_same_bits(dtype, variant):
    x = random_array(dtype, CHUNK + 17)
    results = []
    for used in ("baseline", variant):
        kernels.use_variant(used)
        y = x.copy()
        known([y]).clamp(0.7, 2)
        results.append((known([x]).extremes(2), y.data.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("steps", [1, 5, None], ids=["one step", "five steps", "beyond the largest number"])
def test_bounds_at_the_ends_of_a_range_are_those_that_the_dtype_holds(variant, dtype, steps):
    kernels.use_variant(variant)
    known_format = format_named(dtype)
    bound = math.nextafter(math.inf, 0.0) if steps is None else steps * known_format.step
    data = host_array([math.inf, -math.inf, math.nan, 1.0, 0.0, -steps * known_format.step if steps else -1.0], dtype)
    expected = [bound if steps else known_format.largest, -bound if steps else -known_format.largest]
    for kind in (with_kernels, without_kernels):
        x = data.copy()
        clamp_(kind([x]), bound, threads=1)
        found = number(x).astype(np.float64)
        assert found[:2].tolist() == expected
        assert np.isnan(found[2])
        assert found[3:].tolist() == [min(1.0, bound), 0.0, -bound if steps else -1.0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_as_without_kernels(variant, dtype, size):
    kernels.use_variant(variant)
    arrays = [random_array(dtype, size), random_array(dtype, 3, seed=1)]
    fast, plain = with_kernels(arrays), without_kernels(arrays)
    with np.errstate(all="ignore"):
        for p in (1.0, 1.5, 2.0, 3.0):
            error = HOST.sum_error(size + 3, fast, p, TREE) + 1e-13
            assert HOST.power_sum(fast, p, TREE) == pytest.approx(HOST.power_sum(plain, p, TREE), rel=error)
        assert HOST.largest(fast, TREE) == pytest.approx(HOST.largest(plain, TREE), rel=1e-15)
        assert HOST.smallest(fast, TREE) == pytest.approx(HOST.smallest(plain, TREE), rel=1e-15)
        for coefficient in (factors(0.3), factors(1e-4), factors(0.7, 2.0**-20), factors(math.nan)):
            one, other = HOST.scale(fast, coefficient, TREE), HOST.scale(plain, coefficient, TREE)
            for a, b in zip(one, other, strict=True):
                assert_same(a, b)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", REAL)
def test_every_kind_of_number_is_scaled_as_without_kernels(variant, dtype):
    """All 65,536 numbers of a half type; of the others, random bits, subnormals included."""
    kernels.use_variant(variant)
    rng = np.random.default_rng(7)
    if dtype in ("float16", "bfloat16"):
        data = np.arange(1 << 16, dtype=np.uint16)
        x = HostArray(data.view(np.float16) if dtype == "float16" else data, dtype)
    else:
        x = HostArray(rng.integers(0, 256, 1 << 19, np.uint8).view(dtype), dtype)
    with np.errstate(all="ignore"):
        for first, second in ((0.3, 1.0), (1.0 - 2.0**-20, 1.0), (1e-30, 1.0), (0.5, 2.0**-120), (2.0**-140, 1.0)):
            coefficient = factors(first, second)
            (a,), (b,) = (HOST.scale(kind([x]), coefficient, TREE) for kind in (with_kernels, without_kernels))
            assert_same(a, b)
            check_not_above(x, a, product_factors(x, coefficient))


def assert_same(a, b):
    """Both hold the same bits, but for those of NaN."""
    one, other = (number(x).view(number(x).real.dtype) for x in (a, b))
    assert np.array_equal(one, other, equal_nan=True)
    there = ~np.isnan(one)
    assert np.array_equal(np.signbit(one[there]), np.signbit(other[there]))


def product_factors(x, coefficient):
    chosen = coefficient.wide if format_named(x.dtype) is FLOAT64 else coefficient.narrow
    return np.longdouble(chosen.first) * np.longdouble(chosen.second)


def check_not_above(x, y, factor):
    """|y| is at most |x| times the factor and half a unit of the product's rounding."""
    exact = np.abs(number(x).astype(np.longdouble)) * factor
    unit = 2.0**-53 if format_named(x.dtype) is FLOAT64 else 2.0**-24
    finite = np.isfinite(exact)
    assert (np.abs(number(y).astype(np.longdouble))[finite] <= exact[finite] * (1 + np.longdouble(unit))).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [[math.nan], [math.inf, -math.inf], [math.nan, math.inf, math.nan]])
def test_counts_what_is_not_finite_in_the_same_pass(variant, dtype, bad):
    kernels.use_variant(variant)
    values = np.ones(CHUNK + 40)
    values[np.linspace(0, len(values) - 1, len(bad)).astype(int)] = bad
    arrays = known([host_array(values, dtype), host_array(np.ones(5), dtype)])
    for p in (1.0, 2.0, 3.0):
        total, nonfinite = arrays.sum(p, 1.0, True, 2)
        assert nonfinite == len(bad)
        assert not math.isfinite(total)
    largest, _, nonfinite = arrays.extremes(2)
    assert nonfinite == len(bad)
    assert math.isnan(largest) == any(map(math.isnan, bad))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "scales", [[1.0], [1e30], [1e-30], [1e-38], [1e30, 1e-30], [1e-12, 1e-30], [1e-19, 0.0], [1e18, 1.0], [3e-41]]
)
def test_sums_of_squares_of_bfloat16_are_right_over_its_whole_range(variant, scales):
    kernels.use_variant(variant)
    rng = np.random.default_rng(7)
    x = host_array(rng.normal(size=300) * np.resize(scales, 300), "bfloat16")
    squares = [Fraction(v) ** 2 for v in number(x).tolist()]
    total, nonfinite = known([x]).sum(2.0, 1.0, True, 1)
    assert nonfinite == 0
    assert abs(Fraction(total) / sum(squares) - 1) <= Fraction(HOST.sum_error(300, with_kernels([x]), 2.0, TREE))


@pytest.mark.parametrize("seed", range(40))
def test_fuzzed_sizes_offsets_and_values(seed):
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(int(rng.integers(1, 8))):
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        size, offset = int(rng.integers(0, 3000)), int(rng.integers(0, 40))
        scale = 10.0 ** rng.uniform(-4, 4)
        arrays.append(HostArray(random_array(dtype, size + offset, seed, scale).data[offset:], dtype))
    fast, plain = with_kernels(arrays), without_kernels(arrays)
    assert (fast.elements(), fast.dtypes) == (plain.elements(), plain.dtypes)
    with np.errstate(all="ignore"):
        for p in (1.0, 2.0, 2.5):
            error = HOST.sum_error(fast.elements(), fast, p, TREE) + 1e-13
            assert HOST.power_sum(fast, p, TREE) == pytest.approx(HOST.power_sum(plain, p, TREE), rel=error)
        for a, b in zip(HOST.scale(fast, factors(0.37), TREE), HOST.scale(plain, factors(0.37), TREE), strict=True):
            assert_same(a, b)
        bound = float(10.0 ** rng.uniform(-4, 4))
        clamped = [[x.copy() for x in arrays if "complex" not in x.dtype] for _ in range(2)]
        clamp_(with_kernels(clamped[0]), bound, threads=1)
        clamp_(without_kernels(clamped[1]), bound, threads=1)
        assert all(a.data.tobytes() == b.data.tobytes() for a, b in zip(*clamped, strict=True))


@pytest.mark.parametrize("order", ["C", "F", "permuted", "reversed"])
def test_dense_in_any_order_is_known_to_the_kernels(order):
    base = np.arange(1.0, 61.0).reshape(3, 4, 5).astype(np.float32)
    x = {
        "C": base,
        "F": np.asfortranarray(base),
        "permuted": base.transpose(1, 2, 0),
        "reversed": base[::-1, :, ::-1],
    }[order]
    assert list(describe_buffers([x]).left_out) == []
    assert known([HostArray(x, "float32")]).sum(1.0, 1.0, False, 1)[0] == 1830.0
    given = x.copy(order="K") if order != "reversed" else x
    before = given.copy()
    norm = gradclip.clip_grad_norm_(given, 1.0)
    np.testing.assert_allclose(given, before / norm, rtol=3e-7)


@pytest.mark.parametrize(
    "x",
    [np.ones((4, 4), np.float32)[:, ::2], np.broadcast_to(np.float32(1), (4,)), np.ones(9, np.int8)[1:].view("f4")],
    ids=["strided", "expanded", "unaligned"],
)
def test_the_rest_goes_another_way(x):
    assert list(describe_buffers([x]).left_out) == [0]
    assert gradclip.global_norm(x) == pytest.approx(np.linalg.norm(x.astype(np.float64)))


def counted_meanwhile(call):
    """Return how far a thread counts while the call runs, from and to calls of which no bytecode is in between."""
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    (before,), _, (after,) = map(partial.__call__, [partial(counted.copy), call, partial(counted.copy)])
    done.set()
    thread.join()
    return after - before


def test_another_thread_runs_meanwhile():
    """The interpreter is not held: a thread that counts gets on while a long sum runs."""
    arrays = known([host_array(np.ones(1 << 22), "float32")])
    assert counted_meanwhile(partial(sorted, np.random.default_rng(0).integers(9, size=10**5).tolist())) == 0
    assert any(counted_meanwhile(partial(arrays.sum, 1.5, 1.0, False, 1)) for _ in range(10))


def test_formats_have_the_sizes_that_the_kernels_assume():
    assert [format_named(dtype).precision for dtype in REAL] == [24, 53, 11, 8]
