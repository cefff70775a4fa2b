"""Products of matrices called as XLA calls them."""

import numpy as np
import pytest

from gradclip._src.native import describe_buffers, kernels
from xla_calls import INVALID_ARGUMENT, Caller


def call(capsule, arrays, results, threads=2):
    caller = Caller()
    refused = caller.call(capsule, arrays, results, threads=threads) is not None
    return caller.errors if refused else None


def known(x):
    return describe_buffers([x])[0]


def sides():
    random = np.random.default_rng(0)
    return random.normal(size=(2, 6, 13)).astype(np.float32), random.normal(size=(2, 6, 17)).astype(np.float16)


def test_the_bits_of_outer_sums_called_from_python():
    (left, right), weights = sides(), np.array([0.5, 0.0, 3.0])
    for arrays, rows in (([left, right, weights], 13), ([right, weights], 1)):
        totals, direct = np.full((2, rows, 17), 7.0), np.full((2, rows, 17), 8.0)
        assert call(kernels.xla_outer_sums(), arrays, [totals]) is None
        of_left = known(left) if rows > 1 else None
        kernels.outer_sums(of_left, known(right), known(weights), known(direct), 2, rows, 17, 1)
        assert totals.tolist() == direct.tolist()


def test_the_bits_of_gram_squares_called_from_python():
    left, right = sides()
    found, direct = [np.full(2, 7.0) for _ in range(2)], [np.full(2, 8.0) for _ in range(2)]
    assert call(kernels.xla_gram_squares(), [left, right], found) is None
    kernels.gram_squares(known(left), known(right), 2, 6, 13, 17, *map(known, direct), 1)
    assert [x.tolist() for x in found] == [x.tolist() for x in direct]


LEFT, RIGHT = sides()


@pytest.mark.parametrize(
    ("arrays", "results", "message"),
    [
        ([LEFT], [np.zeros((2, 13, 17))], "one or two sides, weights and one result"),
        ([LEFT, RIGHT, np.ones(3)], [np.zeros(2)] * 2, "one or two sides, weights and one result"),
        ([LEFT[0], RIGHT, np.ones(3)], [np.zeros((2, 13, 17))], "three axes"),
        ([LEFT[:1], RIGHT, np.ones(3)], [np.zeros((2, 13, 17))], "do not match"),
        ([LEFT, RIGHT[:, :5], np.ones(3)], [np.zeros((2, 13, 17))], "do not match"),
        ([LEFT, RIGHT, np.ones(3, np.float32)], [np.zeros((2, 13, 17))], "must be float64"),
        ([LEFT, RIGHT, np.ones(3)], [np.zeros((2, 13, 16))], "totals must be blocks"),
        ([LEFT, RIGHT, np.ones(4)], [np.zeros((2, 13, 17))], "equally many rows"),
        ([LEFT.astype(np.int32), RIGHT, np.ones(3)], [np.zeros((2, 13, 17))], "XLA's type 4"),
    ],
)
def test_a_wrong_call_for_outer_sums_is_an_error(arrays, results, message):
    ((code, said),) = call(kernels.xla_outer_sums(), arrays, results)
    assert code == INVALID_ARGUMENT
    assert message in said


@pytest.mark.parametrize(
    ("arrays", "results", "message"),
    [
        ([LEFT], [np.zeros(2)] * 2, "two sides and two results"),
        ([LEFT, RIGHT], [np.zeros(2)], "two sides and two results"),
        ([LEFT, RIGHT[0]], [np.zeros(2)] * 2, "three axes"),
        ([LEFT, RIGHT[:1]], [np.zeros(2)] * 2, "do not match"),
        ([LEFT, RIGHT], [np.zeros(2), np.zeros(3)], "one number for each sum"),
        ([LEFT, RIGHT], [np.zeros(2), np.zeros(2, np.float32)], "must be float64"),
    ],
)
def test_a_wrong_call_for_gram_squares_is_an_error(arrays, results, message):
    ((code, said),) = call(kernels.xla_gram_squares(), arrays, results)
    assert code == INVALID_ARGUMENT
    assert message in said
