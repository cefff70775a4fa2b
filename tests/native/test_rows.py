"""Arrays cut into rows: each is measured and scaled as an array of its own would be, to the same bits."""

import numpy as np
import pytest

from gradclip._src.native import describe_buffers, kernels
from host_arrays import DTYPES, IN_USE, VARIANTS, random_array

CHUNK = 65536
# Rows of no elements, no rows, rows of less than the kernels take at a time, rows longer than a chunk.
COUNTS = ((5, 0), (0, 0), (300, 17), (1, 3 * CHUNK + 5), (3, CHUNK), (7000, 64), (2, CHUNK - 1))


@pytest.fixture(autouse=True)
def variant_in_use():
    yield
    kernels.use_variant(IN_USE)


def known(arrays):
    described, left_out = describe_buffers(list(arrays))
    assert list(left_out) == []
    return described


def arrays_and_rows(dtype):
    arrays = [random_array(dtype, count * length).data for count, length in COUNTS]
    shapes = [(count, length) for count, length in COUNTS]
    return arrays, [row for array, shape in zip(arrays, shapes, strict=True) for row in array.reshape(shape)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_a_row_is_measured_as_an_array(dtype, p):
    arrays, rows = arrays_and_rows(dtype)
    counts, sums = [count for count, _ in COUNTS], np.full(len(rows), np.nan)
    *expected, _ = known(rows).sums_of_each(p, False, 1)
    for variant in VARIANTS:
        kernels.use_variant(variant)
        for threads in (1, 3):
            known(arrays).sum_rows(counts, p, known([sums]), threads)
            assert sums.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_scaled_as_an_array(dtype):
    random = np.random.default_rng(2)
    counts = [count for count, _ in COUNTS]
    table = random.uniform(0.1, 0.9, size=(5, sum(counts)))
    table[0] = random.integers(0, 2, size=sum(counts))
    table[[2, 4]] = random.choice([1.0, 0.5], size=(2, sum(counts)))
    table[3:] = table[3:].astype(np.float32)
    found = set()
    for variant in VARIANTS:
        kernels.use_variant(variant)
        for threads in (1, 3):
            arrays, rows = arrays_and_rows(dtype)
            copies = [row.copy() for row in rows]
            mine, places = known(arrays), [np.full_like(array, 9) for array in arrays]
            mine.scale_rows(known(places), counts, known([table]), threads)
            mine.scale_rows(mine, counts, known([table]), threads)
            assert all(place.tobytes() == array.tobytes() for place, array in zip(places, arrays, strict=True))
            described = known(copies)
            described.scale_groups(described, range(len(copies)), known([table]), len(copies), 1)
            assert all(row.tobytes() == copy.tobytes() for row, copy in zip(rows, copies, strict=True))
            found.add(b"".join(array.tobytes() for array in arrays))
    assert len(found) == 1


def test_rows_that_are_kept_may_lie_in_memory_that_must_not_be_written():
    x = np.frombuffer(np.ones(6, np.float32).tobytes(), np.float32)
    known([x]).scale_rows(known([x]), [2], known([np.array([[1.0, 1.0]] + [[0.5, 0.5]] * 4)]), 1)
    assert x.tolist() == [1.0] * 6


def test_each_array_needs_a_place():
    x = known([np.ones(6), np.ones(6)])
    with pytest.raises(ValueError, match="a target for each array"):
        x.scale_rows(known([np.ones(6)]), [2, 2], known([np.ones((5, 4))]), 1)


def test_an_array_has_rows_of_one_length():
    x = known([np.ones(7)])
    for count in (2, 0):
        with pytest.raises(ValueError, match="given number of equal rows"):
            x.sum_rows([count], 2.0, known([np.zeros(2)]), 1)
