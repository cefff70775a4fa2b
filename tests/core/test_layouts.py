"""Layouts of several norms: which norms belong to which part, and where they are in a vector."""

import numpy as np
import pytest

from gradclip._src.core.layouts import LAYER, Groups, Rows, units_along

ROWS = Rows([units_along((0,)), units_along(()), units_along((0, 1))], [(2, 3), (4,), (2, 1)])


def test_groups_have_one_norm_each():
    layout = Groups([[2, 0], [], [1]])
    assert (layout.number, layout.count, layout.alone) == (3, 3, False)
    assert layout.part(0) == layout.parts[0] == ([2, 0], LAYER)
    assert layout.group_of() == {2: 0, 0: 0, 1: 2}
    assert layout.each([1.0, 2.0, 3.0]).tolist() == [1.0, 2.0, 3.0]
    assert layout.parts_of(np.array([True, False, True])) == [0, 2]


def test_consecutive_groups_have_the_same_sizes():
    assert list(map(list, Groups.consecutive([[2, 0], [], [1]]).groups)) == [[0, 1], [], [2]]
    alone = Groups.each_alone(2)
    assert (alone.groups, alone.alone) == ([(0,), (1,)], True)


def test_rows_have_a_norm_for_each_unit():
    assert (ROWS.number, ROWS.count) == (3, 5)
    assert [(units.number, units.elements) for units in ROWS.units] == [(2, 3), (1, 4), (2, 1)]
    assert ROWS.array_of.tolist() == [0, 0, 1, 2, 2]
    assert ROWS.each([7.0, 8.0, 9.0]).tolist() == [7.0, 7.0, 8.0, 9.0, 9.0]
    assert ROWS.parts_of(np.array([False, True, False, False, False])) == [0]
    assert [part.indices for part in ROWS.parts] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("number", "shape", "found"), [(0, (2,), [0.0, 1.0]), (1, (), 2.0), (2, (2, 1), [[3.0], [4.0]])]
)
def test_the_norms_of_a_part_are_a_piece_of_the_vector(number, shape, found):
    values = np.arange(5.0)
    assert ROWS.shaped(values)[number].shape == shape
    assert ROWS.shaped(values)[number].tolist() == found
    assert values[ROWS.places(number)].ravel().tolist() == np.ravel(found).tolist()
