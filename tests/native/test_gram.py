"""Norms of sums of outer products from inner products: within the bound that `native/gram.hpp` proves."""

from itertools import product

import numpy as np
import pytest

from exact_matrices import check_gram_squares
from gradclip._src.native import describe_buffers, kernels
from host_arrays import IN_USE, VARIANTS, host_array, number

DTYPES = ("float32", "float64", "float16", "bfloat16")
# N, T, rows, columns: one term; less and more than a tile; more columns than are multiplied at once.
SHAPES = ((3, 1, 5, 7), (2, 2, 1, 3), (2, 13, 4, 17), (1, 20, 150, 3))


@pytest.fixture(autouse=True)
def variant_in_use():
    yield
    kernels.use_variant(IN_USE)


def known(x):
    described, left_out = describe_buffers([x])
    assert list(left_out) == []
    return described


def gram_squares(left, right, threads=1):
    lengths = *left.shape, right.shape[2]
    squares, sizes = np.full(len(left), 7.0), np.full(len(left), 7.0)
    kernels.gram_squares(known(left), known(right), *lengths, known(squares), known(sizes), threads)
    return squares, sizes


def sides(shape, dtypes=("float32", "float32"), scale=1.0):
    """Return numbers of mixed magnitudes. In half of the sums, terms nearly cancel."""
    sums, terms, *widths = shape
    random = np.random.default_rng(shape)
    for width, dtype in zip(widths, dtypes, strict=True):
        values = random.normal(size=(sums, terms, width)) * 2.0 ** random.integers(-9, 5, size=(sums, terms, 1)) * scale
        if width == widths[0]:
            values[::2, 1::2] = -values[::2, : terms // 2 * 2 : 2]
        else:
            values[::2, 1::2] = values[::2, : terms // 2 * 2 : 2] * (1 + 2.0**-8)
        x = host_array(values, dtype)
        yield x.data, number(x)


def check(left, right, x, y, variant):
    kernels.use_variant(variant)
    check_gram_squares(*gram_squares(left, right), x, y, left.shape[2] + right.shape[2] + 2 * left.shape[1] + 8)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtypes", list(product(DTYPES, DTYPES)))
def test_the_proven_bound_holds(variant, dtypes):
    for shape in SHAPES:
        (left, x), (right, y) = sides(shape, dtypes)
        check(left, right, x, y, variant)


@pytest.mark.parametrize("scale", [1e-41, 1e33])
def test_no_number_of_a_narrower_format_leaves_the_range(scale):
    for shape in SHAPES:
        (left, x), (right, y) = sides(shape, scale=scale)
        check(left, right, x, y, IN_USE)


# Strips of 192 terms, and blocks of 128 columns.
@pytest.mark.parametrize(
    "shape", [(2, 12, 130, 129), (2, 33, 40, 300), (3, 192, 5, 6), (2, 411, 9, 14), (5, 1, 300, 70)]
)
def test_sums_of_integers_are_exact(shape):
    random = np.random.default_rng(shape)
    left, right = (random.integers(-9, 10, size=(*shape[:2], n)).astype(np.float32) for n in shape[2:])
    exact = (np.einsum("nti,ntj->nij", left, right, dtype=np.float64) ** 2).sum((1, 2))
    for variant, threads in product(VARIANTS, (1, 4)):
        kernels.use_variant(variant)
        np.testing.assert_array_equal(gram_squares(left, right, threads)[0], exact)


@pytest.mark.parametrize("shape", [(9, 50, 800, 70), (3, 400, 60, 50), (500, 1, 3000, 2000), (2, 3, 20, 30)])
def test_the_bits_of_one_sum_depend_on_it_alone(shape):
    (left, _), (right, _) = sides(shape)
    first = [x.tobytes() for x in gram_squares(left, right)]
    for variant, threads in product(VARIANTS, (1, 2, 3, 4)):
        kernels.use_variant(variant)
        assert [x.tobytes() for x in gram_squares(left, right, threads)] == first
    for n in (0, shape[0] - 1):
        alone = gram_squares(left[n : n + 1].copy(), right[n : n + 1].copy())
        assert [x.tobytes() for x in alone] == [x[n : n + 1].tobytes() for x in gram_squares(left, right, 2)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("terms", [1, 3, 20])
def test_what_is_not_finite_makes_its_sum_not_a_number(bad, terms):
    left, right = np.ones((4, terms, 5), np.float32), np.ones((4, terms, 6), np.float32)
    left[1, -1, 2], right[3, 0, 0] = bad, bad
    right[1], left[3] = 0.0, 0.0
    squares, sizes = gram_squares(left, right)
    assert np.isnan(squares).tolist() == np.isnan(sizes).tolist() == [False, True, False, True]
    assert squares[[0, 2]].tolist() == [30.0 * terms**2] * 2


@pytest.mark.parametrize("terms", [1, 2])
def test_float64_that_overflows_is_not_a_number(terms):
    x = np.full((1, terms, 2), 1e100)
    assert np.isnan(gram_squares(x, x)).all()


@pytest.mark.parametrize("shape", [(3, 0, 2, 2), (2, 1, 0, 4), (2, 5, 3, 0), (0, 4, 2, 2), (2, 17, 0, 0)])
def test_nothing_to_add(shape):
    squares, sizes = gram_squares(np.ones((*shape[:2], shape[2])), np.ones((*shape[:2], shape[3])))
    assert not squares.any()
    assert not sizes.any()


@pytest.mark.parametrize(
    ("lengths", "results", "message"),
    [
        ((2, 3, 5, 4), 2, "left side must be"),
        ((2, 3, 4, 4), 2, "right side must be"),
        ((2, 3, 4, 5), 3, "one number for each sum"),
        ((-2, -3, 4, 5), -2, "one number for each sum"),
        ((2, -3, -4, -5), 2, "negative"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error(lengths, results, message):
    left, right, numbers = np.ones((2, 3, 4)), np.ones((2, 3, 5)), np.ones(abs(results))
    with pytest.raises(ValueError, match=message):
        kernels.gram_squares(known(left), known(right), *lengths, known(numbers), known(numbers), 1)


def test_complex_matrices_are_an_error():
    x, numbers = np.ones((2, 3, 4), np.complex64), np.ones(2)
    with pytest.raises(ValueError, match="real matrices"):
        kernels.gram_squares(known(x), known(x), 2, 3, 4, 4, known(numbers), known(numbers), 1)
