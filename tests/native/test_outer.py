"""Weighted sums of outer products: each total has the bits of one chain of fused multiply-adds."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from exact_matrices import check_outer_sums
from gradclip._src.native import describe_buffers, kernels
from host_arrays import IN_USE, VARIANTS, host_array, number

DTYPES = ("float32", "float64", "float16", "bfloat16")
# Blocks, K, rows, columns: single rows and columns, edges of tiles, few columns, whole tiles.
SHAPES = ((1, 3, 1, 1), (2, 5, 13, 17), (1, 4, 30, 3), (1, 2, 2, 40), (3, 6, 24, 16), (2, 7, 1, 5), (1, 3, 5, 1))


@pytest.fixture(autouse=True)
def variant_in_use():
    yield
    kernels.use_variant(IN_USE)


def known(x):
    described, left_out = describe_buffers([x])
    assert list(left_out) == []
    return described


def outer_sums(left, right, weights, threads=1):
    """Call the kernel for arrays (blocks, K, rows) and (blocks, K, columns)."""
    blocks, _, columns = right.shape
    rows = 1 if left is None else left.shape[2]
    totals = np.full((blocks, rows, columns), 7.0)
    sides = [None if x is None else known(x) for x in (left, right)]
    kernels.outer_sums(*sides, known(weights), known(totals), blocks, rows, columns, threads)
    return totals


def sides(shape, dtypes=("float32", "float32"), seed=0):
    """Return numbers of mixed magnitudes and signs, some of which cancel, as given and as numbers."""
    blocks, depth, *widths = shape
    random = np.random.default_rng([seed, *shape])
    for width, dtype in zip(widths, dtypes, strict=True):
        values = random.normal(size=(blocks, depth, width)) * 2.0 ** random.integers(-10, 5, size=(blocks, depth, 1))
        values[:, 1::2] = -values[:, : depth // 2 * 2 : 2] * random.choice([1.0, 1.001])
        x = host_array(values, dtype)
        yield x.data, number(x)


def chain(weights, left, right):
    total = 0.0
    for weight, x, y in zip(weights, left, right, strict=True):
        total = float(Fraction(total) + Fraction(float(weight) * float(x)) * Fraction(float(y)))
    return total


def expected(weights, left, right):
    each = np.repeat(weights, left.shape[1] // len(weights))
    blocks, rows, columns = len(left), left.shape[2], right.shape[2]
    totals = np.empty((blocks, rows, columns))
    for g, i, j in product(range(blocks), range(rows), range(columns)):
        totals[g, i, j] = chain(each, left[g, :, i], right[g, :, j])
    return totals


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", list(product(DTYPES, DTYPES)))
def test_each_total_is_one_chain_in_the_order_of_k(variant, dtypes):
    kernels.use_variant(variant)
    for shape in SHAPES:
        (left, x), (right, y) = sides(shape, dtypes)
        weights = np.random.default_rng(1).uniform(size=shape[1])
        assert outer_sums(left, right, weights).tolist() == expected(weights, x, y).tolist()


@pytest.mark.parametrize("with_left", [True, False])
def test_the_roundings_of_a_term_are_at_most_those_promised(with_left):
    (left, x), (right, y) = sides((1, 300, 2, 3))
    weights = np.random.default_rng(2).uniform(size=300)
    check_outer_sums(outer_sums(left if with_left else None, right, weights), weights, x if with_left else None, y)


# Several blocks of K, and more rows and columns than a thread takes at once, also of few columns.
@pytest.mark.parametrize("shape", [(1, 600, 500, 530), (2, 520, 700, 12), (2, 300, 3, 1100), (1, 257, 252, 513)])
def test_sums_of_integers_are_exact(shape):
    random = np.random.default_rng(shape)
    left, right = (random.integers(-99, 100, size=(*shape[:2], n)).astype(np.float32) for n in shape[2:])
    weights = random.integers(0, 4, size=shape[1]).astype(np.float64)
    weighted = left * weights[:, None]
    exact = np.einsum("gki,gkj->gij", weighted, right.astype(np.float64))  # `@` would start threads of its own
    for variant, threads in product(VARIANTS, (1, 4)):
        kernels.use_variant(variant)
        np.testing.assert_array_equal(outer_sums(left, right, weights, threads), exact)


# Enough products for four threads.
@pytest.mark.parametrize("shape", [(1, 150, 350, 330), (2, 700, 1300, 10), (5, 300, 120, 100)])
def test_the_same_bits_in_every_variant_and_for_every_number_of_threads(shape):
    (left, _), (right, _) = sides(shape)
    weights = np.random.default_rng(3).uniform(size=shape[1])
    first = outer_sums(left, right, weights)
    for variant, threads in product(VARIANTS, (1, 2, 3, 4)):
        kernels.use_variant(variant)
        assert outer_sums(left, right, weights, threads).tobytes() == first.tobytes()


def test_a_weight_is_for_equally_many_rows():
    (left, x), (right, y) = sides((2, 12, 5, 7))
    weights = np.array([0.5, 0.25, 3.0])
    assert outer_sums(left, right, weights).tolist() == expected(weights, x, y).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("with_left", [True, False])
def test_a_row_of_weight_zero_adds_nothing_whatever_it_holds(variant, with_left):
    kernels.use_variant(variant)
    (left, _), (right, _) = sides((2, 600, 14, 20))
    weights = np.random.default_rng(4).uniform(size=300)
    weights[[0, 7, 129, 299]] = 0.0, -0.0, 0.0, 0.0
    keep = np.repeat(weights != 0.0, 2)
    kept = outer_sums(left[:, keep].copy() if with_left else None, right[:, keep].copy(), weights[weights != 0.0])
    left[:, ~keep], right[:, ~keep] = np.nan, np.inf
    for threads in (1, 2):
        assert outer_sums(left if with_left else None, right, weights, threads).tobytes() == kept.tobytes()


@pytest.mark.parametrize("with_left", [True, False])
def test_a_weight_that_is_not_a_number_spoils_everything(with_left):
    (left, _), (right, _) = sides((1, 4, 3, 18))
    assert np.isnan(outer_sums(left if with_left else None, right, np.array([1.0, np.nan, 1.0, 0.0]))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 1, 5), (2, 21, 1, 40), (3, 100, 1, 5000)])
def test_without_a_left_side_rows_are_added_in_order(dtype, shape):
    _, (right, y) = sides(shape, ("float32", dtype))
    weights = np.random.default_rng(5).uniform(size=shape[1])
    totals = np.zeros((shape[0], 1, shape[3]))
    for k, weight in enumerate(weights):
        totals[:, 0] += weight * y[:, k].astype(np.float64)
    for variant, threads in product(VARIANTS, (1, 2, 3, 4)):
        kernels.use_variant(variant)
        assert outer_sums(None, right, weights, threads).tolist() == totals.tolist()


def test_the_smallest_and_largest_numbers():
    left = np.array([[[1e-45], [3e38], [1e-45]]], np.float32)
    right = np.array([[[1e-45, 3e38], [3e38, 3e38], [3e38, 1e-45]]], np.float32)
    weights = np.array([1.0, 0.5, 3e-160])
    assert outer_sums(left, right, weights).tolist() == expected(weights, left, right).tolist()


@pytest.mark.parametrize("with_left", [True, False])
def test_nothing_to_add(with_left):
    left, right = np.ones((2, 0, 3), np.float32), np.ones((2, 0, 4), np.float32)
    for weights in (np.ones(0), np.ones(5)):
        assert not outer_sums(left if with_left else None, right, weights).any()
    assert outer_sums(np.ones((2, 3, 0)), np.ones((2, 3, 4)), np.ones(3)).shape == (2, 0, 4)


ONES = np.ones((2, 6, 3)), np.ones((2, 6, 4)), np.ones(6), np.ones((2, 3, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: np.ones((2, 5, 3))}, "left side must have as many rows"),
        ({0: None}, "there must be one row"),
        ({0: np.ones((2, 6, 3), np.complex64)}, "real matrices"),
        ({1: np.ones((2, 6, 4))[:, :, :3].copy().ravel()[:-1].copy()}, "right side must be blocks"),
        ({2: np.ones(4)}, "equally many rows"),
        ({2: np.ones(0)}, "equally many rows"),
        ({2: np.ones(6, np.float32)}, "must be float64"),
        ({3: np.ones((2, 3, 5))}, "totals must be blocks"),
        ({3: np.ones((2, 3, 4), np.float32)}, "must be float64"),
        ({4: -2}, "negative"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error(changes, message):
    given = [changes.get(i, value) for i, value in enumerate((*ONES, 2, 3, 4, 1))]
    arrays = [None if x is None else known(x) for x in given[:4]]
    with pytest.raises(ValueError, match=message):
        kernels.outer_sums(*arrays, *given[4:])
