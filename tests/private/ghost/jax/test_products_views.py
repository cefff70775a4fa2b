"""Pieces of parameters are where they say, after any sequence of moves."""

import numpy as np
import pytest

from gradclip._src.private.ghost.jax.products import Factor, NotFollowedError, Piece, split


def elements(piece, shape):
    """Return the numbers of a parameter's elements in a piece, each at its place in the piece."""
    steps = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    number = np.asarray(sum(start * step for start, step in zip(piece.start, steps, strict=True)))
    for factors in piece.axes:
        along = np.zeros(1, int)
        for axis, stride, size in factors:
            along = (along[:, None] + stride * steps[axis] * np.arange(size)).reshape(-1)
        number = number[..., None] + along
    return number


def holds(pieces, array, shape):
    """Check that the pieces are exactly the elements of an array that are not -1."""
    found = np.full_like(array, -1)
    for piece in pieces:
        window = tuple(slice(a, a + b) for a, b in zip(piece.offset, piece.shape, strict=True))
        found[window] = elements(piece, shape)
    np.testing.assert_array_equal(found, array)


def move(random, pieces, array):
    """Return pieces and array after the same move, drawn by chance. A reshape may be one that is not followed."""
    kind = random.choice(["transpose", "reshape", "cut", "spread", "join"])
    if kind == "transpose":
        order = random.permutation(array.ndim)
        return [piece.transposed(order) for piece in pieces], array.transpose(order)
    if kind == "reshape":
        whole, new = array.size, []
        while whole > 1 and len(new) < 4:
            new.append(int(random.choice([i for i in range(1, whole + 1) if whole % i == 0])))
            whole //= new[-1]
        new.append(whole)
        return [piece.reshaped(array.shape, new) for piece in pieces], array.reshape(new)
    if kind == "spread":
        places = sorted(random.choice(array.ndim + 2, array.ndim, replace=False).tolist())
        others = [i for i in range(array.ndim + 2) if i not in places]
        return [piece.spread(array.ndim + 2, places) for piece in pieces], np.expand_dims(array, others)
    if not array.ndim:
        return pieces, array
    axis = int(random.integers(array.ndim))
    if kind == "join":
        before = np.full([3 if i == axis else size for i, size in enumerate(array.shape)], -1)
        moved = [piece.moved(axis, 3 + piece.offset[axis]) for piece in pieces]
        return moved, np.concatenate([before, array], axis)
    start, stop = sorted(random.integers(0, array.shape[axis] + 1, 2).tolist())
    stop += start == stop
    cut = [left for piece in pieces if (left := piece.cut(axis, start, stop)) is not None]
    return cut, array[(slice(None),) * axis + (slice(start, stop),)]


@pytest.mark.parametrize("shape", [(12,), (6, 4), (4, 6), (2, 3, 4), (8, 3, 2), (5, 1, 7), ()])
def test_pieces_follow_the_elements(shape):
    random = np.random.default_rng([7, *shape])
    moves, refused = 0, 0
    for _ in range(150):
        pieces, array = [Piece.whole(0, shape)], np.arange(np.prod(shape, dtype=int)).reshape(shape)
        for _ in range(6):
            if array.size == 0 or array.ndim > 6:
                break
            try:
                after = move(random, pieces, array)
            except NotFollowedError:
                refused += 1
                continue
            pieces, array = after
            holds(pieces, array, shape)
            moves += 1
    assert moves > 4 * refused
    assert moves > 300


def test_an_axis_splits_into_outer_and_inner_steps():
    axis = (Factor(0, 4, 3), Factor(1, 1, 4))
    assert split(axis, 3) == ((Factor(0, 4, 3),), (Factor(1, 1, 4),))
    assert split(axis, 6) == ((Factor(0, 4, 3), Factor(1, 2, 2)), (Factor(1, 1, 2),))
    assert split(axis, 1) == ((), axis)
    with pytest.raises(NotFollowedError):
        split(axis, 4)


def test_cuts_of_a_joined_axis_that_are_no_part_of_it_are_refused():
    """Of three rows of four elements each: the second row, its middle, two rows; but not across the end of a row."""
    axis = Piece.whole(0, (3, 5)).cut(1, 0, 4)
    joined = Piece(0, axis.start, (axis.axes[0] + axis.axes[1],), (0,))
    assert elements(joined.cut(0, 4, 8), (3, 5)).tolist() == [5, 6, 7, 8]
    assert elements(joined.cut(0, 5, 7), (3, 5)).tolist() == [6, 7]
    assert elements(joined.cut(0, 4, 12), (3, 5)).tolist() == [5, 6, 7, 8, 10, 11, 12, 13]
    with pytest.raises(NotFollowedError):
        joined.cut(0, 3, 5)


def test_loops_take_the_first_axis():
    piece = Piece.whole(0, (2, 3, 4)).looped(1, 2)
    assert piece.shape == (3, 4)
    assert piece.loops == ((), (Factor(0, 1, 2),))
    assert piece.looped(2, 3).loops == ((), (Factor(0, 1, 2),), (Factor(1, 1, 3),))
    with pytest.raises(NotFollowedError):
        Piece.whole(0, (2, 3)).cut(0, 0, 1).looped(0, 2)
    with pytest.raises(NotFollowedError):
        Piece.whole(0, (2, 3)).moved(0, 1).looped(0, 3)
