"""Results of several norms: in new memory, in place, or as replacements where a gradient cannot be written."""

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.layouts import Groups
from gradclip._src.core.rules import Coefficient, Factors, Into

HALF = Factors(np.array([1.0, 0.5, 0.5]), np.ones(3))
CHOSEN = Coefficient(np.array([True, False, False]), np.array([False, False, True]), HALF, HALF)
LAYOUT = Groups.each_alone(3)
SCALED = [[3.0, 4.0], [1.5, 2.0], [0.0, 0.0]]


def leaves():
    return [np.array([3.0, 4.0]) for _ in range(3)]


@pytest.mark.parametrize("strided", [False, True])
def test_new_memory(strided):
    given = [np.repeat(x, 2)[::2] for x in leaves()] if strided else leaves()
    arrays = HOST.enter(given)
    results = HOST.leave_all(HOST.scale(arrays, CHOSEN, LAYOUT), given)
    assert [x.tolist() for x in results] == SCALED
    assert [x.tolist() for x in given] == [[3.0, 4.0]] * 3
    assert not any(np.shares_memory(x, y) for x, y in zip(given, results, strict=True))


@pytest.mark.parametrize("writable", [False, True])
def test_in_place(writable):
    given = leaves()
    for x in given[0], given[1]:
        x.flags.writeable = writable
    arrays = HOST.enter(given)
    updated = HOST.scale(arrays, CHOSEN, LAYOUT, Into(arrays, given))
    assert [x.tolist() for x in updated] == SCALED
    assert [x is y for x, y in zip(given, updated, strict=True)] == [True, writable, True]
    assert given[1].tolist() == (SCALED[1] if writable else [3.0, 4.0])


def test_what_is_kept_is_the_same_object():
    given = leaves()
    arrays = HOST.enter(given)
    kept = Coefficient(np.ones(3, bool), np.zeros(3, bool), HALF, HALF)
    assert HOST.scale(arrays, kept, LAYOUT, Into(arrays, given)) is given
