"""Chunk by chunk: the same as at once, for sizes at which chunks end, and rows."""

import numpy as np
import pytest

from gradclip._src.backends.host import chunkwise
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.core.layouts import EXAMPLE, TREE, units_along
from gradclip._src.core.rules import Coefficient, Factors
from host_arrays import DTYPES, random_array

SIZES = (1, 15, 16, 17, 32767, 32769, 65537)


class Each:
    """A coefficient for each of three examples, of which the second adds nothing."""

    wide = Factors(np.array([0.5, 2.0, 3.0]), None)
    blank = np.array([False, True, False])

    def weights(self, xp):
        return self.wide


@pytest.mark.parametrize("size", SIZES)
def test_reductions_are_those_of_the_whole(size):
    x = np.random.default_rng(size).integers(-9, 9, size).astype(np.float32)
    array = HostArray.of(x)
    assert chunkwise.power_sum_of(array, 2.0, TREE, None) == np.sum(x.astype(float) ** 2)
    assert chunkwise.power_sum_of(array, 2.0, TREE, 2.0) == np.sum(x.astype(float) ** 2) / 4
    assert chunkwise.largest_of(array, TREE) == np.abs(x).max()
    assert chunkwise.smallest_of(array, TREE) == np.abs(x).min()


def test_each_row_has_its_own():
    array = HostArray.of(np.array([[3.0, 4.0], [-6.0, 8.0]]))
    assert chunkwise.power_sum_of(array, 2.0, EXAMPLE, None).tolist() == [25.0, 100.0]
    assert chunkwise.power_sum_of(array, 2.0, EXAMPLE, np.array([1.0, 2.0])).tolist() == [25.0, 25.0]
    assert chunkwise.largest_of(array, EXAMPLE).tolist() == [4.0, 8.0]
    assert chunkwise.smallest_of(array, EXAMPLE).tolist() == [3.0, 6.0]


# Less than a chunk, several chunks of several rows, rows longer than a chunk.
@pytest.mark.parametrize("shape", [(5, 3), (3000, 7, 9), (3, 40_000), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_those_of_the_transposed_array(shape, dtype):
    x = HostArray(random_array(dtype, int(np.prod(shape))).data.reshape(shape), dtype)
    own = tuple(range(1, len(shape)))
    scope, other = units_along(own), units_along(tuple(axis - 1 for axis in own))
    turned = HostArray(np.ascontiguousarray(np.moveaxis(x.data, 0, -1)), dtype)
    divisor = np.random.default_rng(0).uniform(1, 2, size=shape[1:])
    for reduce in (chunkwise.largest_of, chunkwise.smallest_of):
        assert np.array_equal(reduce(x, scope), reduce(turned, other))
    for p, by in ((1.0, None), (2.0, None), (2.0, divisor), (3.0, divisor)):
        sums = chunkwise.power_sum_of(x, p, scope, by), chunkwise.power_sum_of(turned, p, other, by)
        assert sums[0].shape == shape[1:]
        assert np.allclose(*sums, rtol=1e-12, atol=0)
    keep, blank = np.random.default_rng(1).random(size=(2, *shape[1:])) < 0.3
    wide, narrow = (Factors((1 / divisor).astype(kind), np.ones(shape[1:], kind)) for kind in ("float64", "float32"))
    for array, along in ((x, scope), (turned, other)):
        chunkwise.scale_rows(array, Coefficient(keep, blank, wide, narrow), along)
    assert np.moveaxis(x.data, 0, -1).tobytes() == turned.data.tobytes()


def test_what_is_not_finite_is_counted_and_has_no_smallest():
    x = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert chunkwise.count_nonfinite(HostArray.of(x)) == (1, 2)
    assert np.isnan(chunkwise.smallest_of(HostArray.of(x), TREE))


def test_what_exceeds_the_bound_is_clamped():
    x = np.array([3.0, -0.5, -4.0], np.float32)
    chunkwise.clamp_chunks(HostArray.of(x), 1.0)
    assert x.tolist() == [1.0, -0.5, -1.0]


def test_examples_are_weighed_and_added():
    rows = HostArray.of(np.array([[3.0, 4.0], [np.nan, 1.0], [1.0, -1.0]]))
    assert chunkwise.weighted_sum(rows, Each()).tolist() == [4.5, -1.0]
    assert chunkwise.rounded_sum(rows, Each()).tolist() == [2 + 3, 2 - 3]
