"""Factors of arrays become places in a parameter and arrays in canonical order."""

import jax.numpy as jnp
import numpy as np
import pytest

from gradclip._src.private.ghost.jax.products import (
    Factor,
    NotFollowedError,
    Piece,
    arranged,
    first_of,
    flat,
    ordered,
    place,
)
from gradclip._src.private.ghost.records import MatrixPlace

WHOLE = Piece.whole(0, (4, 6))
ROWS, COLUMNS = (axes[0] for axes in WHOLE.axes)
HEADS, WIDTH = Factor(1, 2, 3), Factor(1, 1, 2)


def test_neighbors_of_one_kind_are_one_axis():
    assert place(WHOLE, (), [ROWS], [COLUMNS]) == MatrixPlace((0, 0), (4, 6), (4, 6), (), (0,), (1,))
    assert place(WHOLE, (), [ROWS], [HEADS, WIDTH]) == MatrixPlace((0, 0), (4, 6), (4, 6), (), (0,), (1,))
    assert place(WHOLE, (), [WIDTH, ROWS, HEADS], ()) == MatrixPlace((0, 0), (4, 6), (24,), (), (0,), ())
    assert place(WHOLE, [HEADS], [ROWS], [WIDTH]) == MatrixPlace((0, 0), (4, 6), (4, 3, 2), (1,), (0,), (2,))
    assert place(WHOLE, (), [ROWS, WIDTH], [HEADS]) == MatrixPlace((0, 0), (4, 6), (4, 3, 2), (), (0, 2), (1,))
    assert place(Piece.whole(0, ()), (), (), ()) == MatrixPlace((), (), (), (), (), ())


def test_a_part_is_a_box():
    cut = WHOLE.cut(0, 1, 3).cut(1, 4, 6)
    assert place(cut, (), cut.axes[1], cut.axes[0]) == MatrixPlace((1, 4), (3, 6), (2, 2), (), (1,), (0,))
    column = WHOLE.cut(1, 4, 5)
    assert place(column, (), column.axes[0], ()) == MatrixPlace((0, 4), (4, 5), (4,), (), (0,), ())


def test_every_second_column_is_no_box():
    with pytest.raises(NotFollowedError):
        place(WHOLE, (), [ROWS], [HEADS])
    with pytest.raises(NotFollowedError):
        place(WHOLE, (), [ROWS], [Factor(1, 3, 2), WIDTH])


def test_the_outermost_factor_is_first():
    assert ordered([WIDTH, ROWS, HEADS]) == [ROWS, HEADS, WIDTH]
    assert first_of([ROWS], [COLUMNS])
    assert not first_of([COLUMNS], [ROWS])
    assert not first_of([WIDTH], [HEADS])
    assert first_of([], [])
    assert not first_of([], [ROWS])


def test_arrays_are_turned_by_their_factors():
    array, terms = np.arange(30).reshape(5, 6), Factor(-1, 0, 5)
    labels = [(terms,), (HEADS, WIDTH)]
    assert flat([(Factor(0, 1, 1),), *labels]) == [terms, HEADS, WIDTH]
    expected = array.reshape(5, 3, 2)
    turned = arranged(jnp.asarray(array), labels, [HEADS], [terms], [WIDTH])
    np.testing.assert_array_equal(turned, expected.transpose(1, 0, 2))
    turned = arranged(jnp.asarray(array), labels, [], [WIDTH, terms], [HEADS])
    np.testing.assert_array_equal(turned, expected.transpose(2, 0, 1).reshape(1, 10, 3))
