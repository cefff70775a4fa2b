"""The kernels' exact sums beside fractions, for every variant, number of threads and cut."""

import threading
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest

from fresh_process import run
from gradclip._src.native import describe_buffers, kernels
from host_arrays import DTYPES, IN_USE, VARIANTS, HostArray, host_array, number, random_array

BLOCK = 2048


@pytest.fixture(autouse=True)
def variant_in_use():
    yield
    kernels.use_variant(IN_USE)


def exact_sum(arrays, p, threads):
    digits, exponent = describe_buffers([x.data for x in arrays])[0].exact_sum(p, threads)
    return Fraction(int.from_bytes(digits, "little")) * Fraction(2) ** exponent


def by_fractions(x, p):
    numbers = number(x)
    parts = [numbers.real, numbers.imag] if "complex" in x.dtype else [numbers]
    return sum(abs(Fraction(v)) ** p for part in parts for v in part.astype(np.float64).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1])
def test_sums_are_exact(dtype, variant, size):
    kernels.use_variant(variant)
    for scale in (1.0, 1e-4):
        x = random_array(dtype, size, scale=scale)
        assert exact_sum([x], 2, 1) == by_fractions(x, 2)
        if "complex" not in dtype:
            assert exact_sum([x], 1, 1) == by_fractions(x, 1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_from_the_smallest_to_the_largest_number(dtype, variant):
    kernels.use_variant(variant)
    lowest, highest = (-1074, 1023) if dtype == "float64" else (-149 if dtype == "float32" else -133, 127)
    rng = np.random.default_rng(0)
    for _ in range(10):
        exponents = rng.integers(lowest, highest, size=77)
        x = host_array(np.ldexp(rng.uniform(1, 2, size=77), exponents) * rng.choice([-1, 1], size=77), dtype)
        for p in (1, 2):
            assert exact_sum([x], p, 1) == by_fractions(x, p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_for_every_cut_and_number_of_threads(dtype):
    x = random_array(dtype, 1_200_077)
    cuts = ([], [65536], [1, 400_000, 1_200_000])
    found = {
        exact_sum([HostArray(piece, dtype) for piece in np.split(x.data, cut)], 2, threads)
        for cut in cuts
        for threads in (1, 2, 3)
    }
    assert len(found) == 1


def test_other_orders_are_refused():
    with pytest.raises(ValueError, match="order 1 or 2"):
        exact_sum([random_array("float32", 3)], 3, 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_and_infinities_which_another_thread_may_have_written_are_refused(variant, dtype, wrong):
    kernels.use_variant(variant)
    for size, place in ((1, 0), (BLOCK + 17, 0), (BLOCK + 17, BLOCK + 16)):
        x = random_array(dtype, size)
        x.data[place] = host_array([wrong], dtype).data[0]
        for p in (1, 2):
            with pytest.raises(RuntimeError, match="another thread has written to it"):
                exact_sum([x], p, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_thread_that_writes_meanwhile_does_not_keep_a_sum_from_ending(variant):
    kernels.use_variant(variant)
    x, done = host_array(np.ones(40 * BLOCK), "float64"), threading.Event()
    written = x.data[3::7]

    def write():
        while not done.is_set():
            for value in (np.inf, 1.0, 1e300, np.nan, 1e-300, 1.0):
                written[:] = value

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            with suppress(RuntimeError):
                exact_sum([x], 2, 1)
    finally:
        done.set()
        writer.join()
    x.data[:] = 1.0
    assert exact_sum([x], 2, 1) == 40 * BLOCK


def test_a_thread_with_a_small_stack_adds_numbers_of_every_size(tmp_path):
    printed = run(
        """
        import threading
        import numpy as np
        from gradclip._src.native import describe_buffers

        x = np.ldexp(1.0, np.arange(4080) % 2040 - 1040)
        digits = []
        threading.stack_size(128 * 1024)
        thread = threading.Thread(target=lambda: digits.append(describe_buffers([x]).kernels.exact_sum(2, 1)[0]))
        thread.start()
        thread.join()
        print(int.from_bytes(digits[0], "little").bit_count())
        """,
        tmp_path,
    )
    assert int(printed) == 2040
