"""What the kernels settle with one look is what `core.coefficient` decides for one norm."""

import math

import numpy as np
import pytest

from gradclip._src.core.coefficient import KEPT, of_number
from gradclip._src.native import describe_buffers

ENOUGH = 2.0**-900
OPEN, ALL_KEPT, SCALED = range(3)


def known(*arrays):
    return describe_buffers(list(arrays)).kernels


def settled(values, p, errors, limits, *, rows=False, enough=ENOUGH):
    """Return the answer for numbers that each are a group or a row, their norms and the table."""
    norms, table = np.full(len(values), np.nan), np.full((5, len(values)), np.nan)
    memory = known(np.array(limits, float)), known(norms), known(table)
    if rows:
        of_rows = known(np.array(values, float).reshape(-1, 1))
        answer = of_rows.settle_rows([len(values)], p, enough, errors[:1], *memory, 1)
    else:
        arrays = known(*(np.array([value]) for value in values))
        answer = arrays.settle_groups(range(len(values)), p, False, enough, errors, *memory, 1)
    return answer, norms, table


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_a_norm_is_settled_as_the_core_does_it(p, rows):
    random, seen = np.random.default_rng(3), set()
    for _ in range(600):
        value = float(random.choice([1.0, 0.3, 1e-120, 1e30])) * random.uniform(0.5, 2.0)
        error = float(random.choice([0.0, 1e-15, 1e-9]))
        near = value * (1.0 + float(random.choice([0.0, 1e-16, -1e-15, 1e-9, -0.9e-9])))
        limit = float(random.choice([near, value * 2, value / 3, value * 1e-39, 0.0, math.inf, -1.0, math.nan]))
        answer, norms, table = settled([value], p, [error], [limit], rows=rows)
        expected = of_number(value, error, limit)
        seen.add(answer)
        if expected is None:
            assert answer == OPEN
            continue
        assert answer == (ALL_KEPT if expected is KEPT else SCALED)
        assert norms.tolist() == [math.sqrt(value * value) if p == 2 else value]
        (wide, wide_second), (narrow, narrow_second) = expected
        assert table[:, 0].tolist() == [float(expected is KEPT), wide, wide_second, narrow, narrow_second]
    assert seen == {OPEN, ALL_KEPT, SCALED}


@pytest.mark.parametrize("rows", [False, True])
def test_what_one_look_cannot_know_is_open(rows):
    for value in (math.nan, math.inf, 1e200, 1e-200, 2.0**127):
        assert settled([1.0, value], 2.0, [0.0] * 2, [10.0], rows=rows)[0] == OPEN
    assert settled([1.0, 0.0], 2.0, [0.0] * 2, [10.0], rows=rows)[0] == ALL_KEPT
    assert settled([3.0, 1.0], 1.0, [0.0] * 2, [2.0, 0.5], rows=rows)[0] == SCALED
    # Numbers of narrow formats lose nothing to underflow.
    assert settled([1.0, 1e-200], 2.0, [0.0] * 2, [10.0], rows=rows, enough=-1.0)[0] == ALL_KEPT


def test_each_group_has_an_error():
    with pytest.raises(ValueError, match="each array must have a group below 1"):
        settled([1.0, 2.0], 2.0, [0.0], [1.0])


@pytest.mark.parametrize("sizes", [[3, 2, 10], [0, 2, 10], [2, 3, 10], [2, 1, 10], [1, 2, 9], [1, 2, 11]])
def test_memory_of_another_size_is_refused(sizes):
    memory = [known(np.zeros(size)) for size in sizes]
    with pytest.raises(ValueError, match=r"memory for (2|10) float64 numbers"):
        known(np.ones((2, 1))).settle_rows([2], 2.0, ENOUGH, [0.0], *memory, 1)
    with pytest.raises(ValueError, match=r"memory for (2|10) float64 numbers"):
        known(np.ones(1), np.ones(1)).settle_groups(range(2), 2.0, False, ENOUGH, [0.0] * 2, *memory, 1)
