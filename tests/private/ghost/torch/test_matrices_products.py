"""Sums of outer products, and norms from inner products, by the kernels and by PyTorch's operations."""

from itertools import product

import numpy as np
import pytest
import torch

from exact_matrices import check_gram_squares, check_outer_sums, gamma
from gradclip._src import native
from gradclip._src.private.ghost.torch import matrices

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(params=["kernels", "operations"])
def by(request, monkeypatch):
    if request.param == "operations":
        monkeypatch.setattr(matrices, "_known", lambda tensors: None)
    return request.param


def side(shape, dtype=torch.float32, seed=0):
    """Return numbers of mixed magnitudes, some of which cancel or are subnormal in float32."""
    random = np.random.default_rng([seed, *shape])
    values = random.normal(size=shape) * 2.0 ** random.integers(-9, 5, size=(*shape[:2], 1))
    values[:, 1::2] = -values[:, : shape[1] // 2 * 2 : 2]
    if dtype != torch.float16:
        values[..., 0] *= 1e-40
    return torch.from_numpy(values).to(dtype)


def numbers(x):
    return x.detach().double().numpy()


def weights_of(count):
    return torch.from_numpy(np.random.default_rng(count).uniform(size=count))


@pytest.mark.parametrize("dtypes", list(product(DTYPES, DTYPES)))
def test_outer_sums_are_exact_but_for_the_promised_roundings(by, dtypes):
    for shape, examples in (((2, 6, 5, 3), 3), ((1, 20, 2, 17), 20)):
        left, right = (side((*shape[:2], n), dtype) for n, dtype in zip(shape[2:], dtypes, strict=True))
        weights = weights_of(examples)
        for x in (left, None):
            found = matrices.outer_sums(x, right, weights)
            assert found.dtype == torch.float64
            check_outer_sums(found, weights, None if x is None else numbers(x), numbers(right))


@pytest.mark.parametrize("dtypes", list(product(DTYPES, DTYPES)))
def test_gram_squares_are_within_the_bound(by, dtypes):
    for shape in ((3, 1, 4, 5), (2, 6, 5, 3)):
        left, right = (side((*shape[:2], n), dtype) for n, dtype in zip(shape[2:], dtypes, strict=True))
        squares, sizes = matrices.gram_squares(left, right)
        assert squares.dtype == sizes.dtype == torch.float64
        roundings = shape[2] + shape[3] + shape[1] ** 2 + 10
        check_gram_squares(squares, sizes, numbers(left), numbers(right), roundings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_rows_are_added_in_float64(by, dtype):
    # 4,097 squares of a small number next to a large one: float32 would lose the small ones.
    x = torch.full((2, 3, 4098), 2.0**-13)
    x[..., 0] = 64.0
    found = matrices.row_squares(x.to(dtype))
    assert found.dtype == torch.float64
    assert found.shape == (2, 3)
    assert (found / (64.0**2 + 4097 * 2.0**-26) - 1).abs().max() <= float(gamma(4100))


def test_squares_of_rows_that_are_not_finite(by):
    found = matrices.row_squares(torch.tensor([[1.0, torch.nan], [torch.inf, 2.0], [3.0, 4.0]]))
    assert not found[:2].isfinite().any()
    assert found[2] == 25.0


def test_rows_of_weight_zero_add_nothing(by):
    left, right = side((2, 6, 5)), side((2, 6, 3))
    left[:, 2:4], right[:, 2:4] = torch.nan, torch.inf
    kept = [0, 1, 4, 5]
    for x in (left, None):
        found = matrices.outer_sums(x, right, torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64))
        rows = None if x is None else numbers(x)[:, kept]
        check_outer_sums(found, np.array([0.5, 2.0]), rows, numbers(right)[:, kept])


@pytest.mark.parametrize("terms", [1, 4])
def test_what_is_not_finite_makes_its_sum_not_a_number(by, terms):
    left, right = torch.ones(3, terms, 2), torch.ones(3, terms, 3)
    left[1, 0, 0], right[1], right[2, 0, 0] = torch.inf, 0.0, torch.nan
    for found in matrices.gram_squares(left, right):
        assert found.isnan().tolist() == [False, True, True]


def test_tensors_without_elements(by):
    ones = torch.ones
    assert torch.equal(matrices.outer_sums(ones(2, 0, 3), ones(2, 0, 4), weights_of(0)), ones(2, 3, 4).double() * 0)
    assert torch.equal(matrices.outer_sums(None, ones(2, 0, 4), weights_of(5)), ones(2, 1, 4).double() * 0)
    assert matrices.outer_sums(ones(2, 3, 0), ones(2, 3, 4), weights_of(3)).shape == (2, 0, 4)
    assert [x.tolist() for x in matrices.gram_squares(ones(2, 0, 3), ones(2, 0, 4))] == [[0.0, 0.0]] * 2
    assert matrices.row_squares(ones(3, 0)).tolist() == [0.0] * 3


def strided(x):
    """Return the same numbers in the same shape, in tensors of other strides, or with other marks."""
    yield x.mT.contiguous().mT
    yield x.flip(1).flip(1)
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield torch._neg_view(-x)
    yield x.clone().requires_grad_()


def test_strides_do_not_change_the_bits(by):
    left, right, weights = side((2, 6, 5)), side((2, 6, 17)), weights_of(3)
    found = matrices.outer_sums(left, right, weights), *matrices.gram_squares(left, right), matrices.row_squares(left)
    for x, y in zip(strided(left), strided(right), strict=True):
        of_strided = matrices.outer_sums(x, y, weights), *matrices.gram_squares(x, y), matrices.row_squares(x)
        assert all(map(torch.equal, of_strided, found))
        assert not any(one.requires_grad for one in of_strided)
    assert torch.equal(matrices.outer_sums(left, right, weights.repeat_interleave(2)[::2]), found[0])


def test_the_kernels_take_tensors_in_host_memory(monkeypatch):
    called = []

    class Kernels:
        fuses = staticmethod(lambda: True)  # on processors where they do not, PyTorch's operations are faster

        def __getattr__(self, name):
            return lambda *args: called.append(name) or getattr(native_kernels, name)(*args)

    native_kernels = native.kernels
    monkeypatch.setattr(native, "kernels", Kernels())
    matrices.outer_sums(side((2, 6, 5)), side((2, 6, 3)), weights_of(3))
    matrices.gram_squares(side((2, 6, 5)), side((2, 6, 3)))
    assert {"outer_sums", "gram_squares"} <= set(called)


def test_other_devices_compute_by_themselves():
    left, right = torch.empty(2, 6, 5, device="meta"), torch.empty(2, 6, 3, device="meta")
    totals = matrices.outer_sums(left, right, torch.empty(3, device="meta"))
    assert (totals.shape, totals.dtype, totals.device.type) == ((2, 5, 3), torch.float64, "meta")
    for found in matrices.gram_squares(left, right):
        assert (found.shape, found.dtype, found.device.type) == ((2,), torch.float64, "meta")
    assert matrices.row_squares(left).device.type == "meta"


@pytest.mark.parametrize(
    ("left", "right", "examples"),
    [((2, 6, 3), (2, 5, 3), 1), ((1, 6, 3), (2, 6, 3), 6), ((2, 6, 3), (2, 6, 3), 4), (None, (2, 6, 3), 0)],
)
def test_shapes_of_outer_sums_that_do_not_fit_are_an_error(by, left, right, examples):
    with pytest.raises(ValueError, match="K a multiple of the number of weights"):
        matrices.outer_sums(None if left is None else torch.ones(left), torch.ones(right), weights_of(examples))


def test_shapes_of_gram_squares_that_do_not_fit_are_an_error(by):
    with pytest.raises(ValueError, match=r"\(N, T, rows\)"):
        matrices.gram_squares(torch.ones(2, 3, 4), torch.ones(2, 4, 3))
