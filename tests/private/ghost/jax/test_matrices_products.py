"""Sums of outer products, and norms from inner products, by the kernels and by XLA's operations."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exact_matrices import check_gram_squares, check_outer_sums, gamma
from frameworks import numpy_dtype
from gradclip._src.private.ghost.jax import matrices

DTYPES = ("float32", "float64", "float16", "bfloat16")
BY = ("kernels", "operations")


@pytest.fixture(params=BY)
def by(request, monkeypatch):
    if request.param == "operations":
        monkeypatch.setattr(matrices, "usable", lambda arrays: False)
    return request.param


def side(shape, dtype="float32", seed=0):
    """Return numbers of mixed magnitudes, some of which cancel or are subnormal in float32."""
    random = np.random.default_rng([seed, *shape])
    values = random.normal(size=shape) * 2.0 ** random.integers(-9, 5, size=(*shape[:2], 1))
    values[:, 1::2] = -values[:, : shape[1] // 2 * 2 : 2]
    if dtype != "float16":
        values[..., 0] *= 1e-40
    with jax.enable_x64(True):
        return jnp.asarray(values.astype(numpy_dtype(dtype)))


def sides(shape):
    """Return left and right sides of each pair of dtypes, of shapes (blocks, K, rows) and (blocks, K, columns)."""
    *ahead, rows, columns = shape
    return [[side((*ahead, rows), one), side((*ahead, columns), other)] for one, other in product(DTYPES, DTYPES)]


def numbers(x):
    return np.asarray(x).astype(np.float64)


def weights_of(count):
    with jax.enable_x64(True):
        return jnp.asarray(np.random.default_rng(count).uniform(size=count))


def test_outer_sums_are_exact_but_for_the_promised_roundings(by):
    cases = [(sides(shape), weights_of(examples)) for shape, examples in (((2, 6, 5, 3), 3), ((1, 20, 2, 17), 20))]
    given = [(x, right, weights) for pairs, weights in cases for left, right in pairs for x in (left, None)]
    # A new function: JAX keeps what it has traced of one, also by the other operations.
    totals = jax.jit(lambda given: [matrices.outer_sums(*one) for one in given])(given)
    for (x, right, weights), found in zip(given, totals, strict=True):
        assert found.dtype == np.float64
        check_outer_sums(found, weights, None if x is None else numbers(x), numbers(right))


def test_gram_squares_are_within_the_bound(by):
    shapes = (3, 1, 4, 5), (2, 6, 5, 3)
    given = [(shape, left, right) for shape in shapes for left, right in sides(shape)]
    found = jax.jit(lambda pairs: [matrices.gram_squares(*pair) for pair in pairs])([pair for _, *pair in given])
    for (shape, left, right), (squares, sizes) in zip(given, found, strict=True):
        assert squares.dtype == sizes.dtype == np.float64
        roundings = shape[2] + shape[3] + shape[1] ** 2 + 10
        check_gram_squares(squares, sizes, numbers(left), numbers(right), roundings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_rows_are_added_in_float64(by, dtype):
    # 4,097 squares of a small number next to a large one: float32 would lose the small ones.
    x = np.full((2, 3, 4098), 2.0**-13)
    x[..., 0] = 64.0
    with jax.enable_x64(True):
        found = matrices.row_squares(jnp.asarray(x.astype(numpy_dtype(dtype))))
    assert found.dtype == np.float64
    assert found.shape == (2, 3)
    exact = 64.0**2 + 4097 * 2.0**-26
    assert np.abs(np.asarray(found) / exact - 1).max() <= float(gamma(4100))


def test_squares_of_rows_that_are_not_finite(by):
    x = jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0], [3.0, 4.0]])
    found = np.asarray(matrices.row_squares(x))
    assert not np.isfinite(found[:2]).any()
    assert found[2] == 25.0


def test_rows_of_weight_zero_add_nothing(by):
    left, right = side((2, 6, 5)).at[:, 2:4].set(jnp.nan), side((2, 6, 3)).at[:, 2:4].set(jnp.inf)
    with jax.enable_x64(True):
        weights = jnp.array([0.5, 0.0, 2.0])
    kept = np.array([0, 1, 4, 5])
    for x in (left, None):
        found = matrices.outer_sums(x, right, weights)
        rows = None if x is None else numbers(x)[:, kept]
        check_outer_sums(found, np.array([0.5, 2.0]), rows, numbers(right)[:, kept])


@pytest.mark.parametrize("terms", [1, 4])
def test_what_is_not_finite_makes_its_sum_not_a_number(by, terms):
    left, right = np.ones((3, terms, 2), np.float32), np.ones((3, terms, 3), np.float32)
    left[1, 0, 0], right[1], right[2, 0, 0] = np.inf, 0.0, np.nan
    for found in matrices.gram_squares(jnp.asarray(left), jnp.asarray(right)):
        assert np.isnan(np.asarray(found)).tolist() == [False, True, True]


def test_arrays_without_elements(by):
    assert (
        matrices.outer_sums(jnp.ones((2, 0, 3)), jnp.ones((2, 0, 4)), weights_of(0)).tolist()
        == np.zeros((2, 3, 4)).tolist()
    )
    assert matrices.outer_sums(None, jnp.ones((2, 0, 4)), weights_of(5)).tolist() == np.zeros((2, 1, 4)).tolist()
    assert matrices.outer_sums(jnp.ones((2, 3, 0)), jnp.ones((2, 3, 4)), weights_of(3)).shape == (2, 0, 4)
    assert [x.tolist() for x in matrices.gram_squares(jnp.ones((2, 0, 3)), jnp.ones((2, 0, 4)))] == [[0.0, 0.0]] * 2
    assert matrices.row_squares(jnp.ones((3, 0))).tolist() == [0.0] * 3


def calls(left, right, weights):
    return matrices.outer_sums(left, right, weights), *matrices.gram_squares(left, right), matrices.row_squares(left)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_compiled_and_mapped_calls_have_the_bits_of_single_ones():
    many = [(side((2, 6, 5), seed=i), side((2, 6, 17), seed=i), weights_of(3)) for i in range(3)]
    single = [calls(*arguments) for arguments in many]
    assert bits(jax.jit(calls)(*many[0])) == bits(single[0])
    with jax.enable_x64(True):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *many)
        together = jax.tree.map(lambda *x: jnp.stack(x), *single)
    assert bits(jax.jit(jax.vmap(calls))(*stacked)) == bits(together)
    assert bits(jax.vmap(calls, (0, 0, None))(*stacked[:2], weights_of(3))) == bits(together)


def test_compiled_programs_call_the_kernels():
    arguments = side((2, 6, 5)), side((2, 6, 3)), weights_of(3)
    text = jax.jit(calls).lower(*arguments).as_text()
    assert all(f"gradclip_{name}" in text for name in ("outer_sums", "gram_squares", "power_sums"))


def test_exported_programs_need_no_kernels():
    left, right, weights = side((2, 6, 5)), side((2, 6, 3)), weights_of(3)
    exported = jax.export.export(jax.jit(calls))(left, right, weights)
    assert "gradclip_" not in exported.mlir_module()
    totals, squares, sizes, rows = jax.export.deserialize(exported.serialize()).call(left, right, weights)
    check_outer_sums(totals, weights, numbers(left), numbers(right))
    check_gram_squares(squares, sizes, numbers(left), numbers(right), 5 + 3 + 36 + 10)
    np.testing.assert_allclose(rows, (numbers(left) ** 2).sum(-1), rtol=1e-15)


@pytest.mark.parametrize(
    ("left", "right", "examples"),
    [((2, 6, 3), (2, 5, 3), 1), ((1, 6, 3), (2, 6, 3), 6), ((2, 6, 3), (2, 6, 3), 4), (None, (2, 6, 3), 0)],
)
def test_shapes_of_outer_sums_that_do_not_fit_are_an_error(by, left, right, examples):
    with pytest.raises(ValueError, match="K a multiple of the number of weights"):
        matrices.outer_sums(None if left is None else jnp.ones(left), jnp.ones(right), weights_of(examples))


def test_shapes_of_gram_squares_that_do_not_fit_are_an_error(by):
    with pytest.raises(ValueError, match=r"\(N, T, rows\)"):
        matrices.gram_squares(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 3)))
