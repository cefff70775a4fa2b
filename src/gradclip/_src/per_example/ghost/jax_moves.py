"""Operations that only move the elements of a parameter, or copy them: where the pieces are in the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.core import JaxprEqn

from gradclip._src.per_example.ghost.jax_views import NotFollowedError, Piece

Pieces = tuple[Piece, ...]


def _same(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    return list(given)


def _transpose(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    return [tuple(piece.transposed(equation.params["permutation"]) for piece in given[0])]


def _reshape(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    if equation.params["dimensions"] is not None:
        raise NotFollowedError
    before, after = equation.invars[0].aval.shape, equation.params["new_sizes"]
    return [tuple(piece.reshaped(before, after) for piece in given[0])]


def _squeeze(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    return [tuple(piece.without(equation.params["dimensions"]) for piece in given[0])]


def _broadcast_in_dim(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    if [size for size in shape if size != 1] != [size for size in equation.invars[0].aval.shape if size != 1]:
        raise NotFollowedError
    return [tuple(piece.spread(len(shape), places) for piece in given[0])]


def _within(pieces: Pieces, starts: Sequence[int], stops: Sequence[int]) -> Pieces:
    """Return the pieces within a slice of their array."""
    for axis, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        pieces = tuple(cut for piece in pieces if (cut := piece.cut(axis, start, stop)) is not None)
    return pieces


def sliced_at(equation: JaxprEqn, pieces: Pieces, starts: Sequence[int]) -> Pieces:
    """Return the pieces in the result of a dynamic slice that begins at `starts`, or as near as it fits."""
    sizes, shape = equation.params["slice_sizes"], equation.invars[0].aval.shape
    first = [min(max(one, 0), most - size) for one, size, most in zip(starts, sizes, shape, strict=True)]
    return _within(pieces, first, [a + b for a, b in zip(first, sizes, strict=True)])


def _slice(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    strides = equation.params["strides"]
    if strides is not None and set(strides) != {1}:
        raise NotFollowedError
    return [_within(given[0], equation.params["start_indices"], equation.params["limit_indices"])]


def _split(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    axis, begin, found = equation.params["axis"], 0, []
    for size in map(int, equation.params["sizes"]):
        cuts = (piece.cut(axis, begin, begin + size) for piece in given[0])
        found.append(tuple(cut for cut in cuts if cut is not None))
        begin += size
    return found


def _concatenate(equation: JaxprEqn, given: Sequence[Pieces]) -> list[Pieces]:
    axis, begin, found = equation.params["dimension"], 0, []
    for value, pieces in zip(equation.invars, given, strict=True):
        found += [piece.moved(axis, begin + piece.offset[axis]) for piece in pieces]
        begin += value.aval.shape[axis]
    return [tuple(found)]


MOVES: dict[str, Callable[[JaxprEqn, Sequence[Pieces]], list[Pieces]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "convert_element_type": _same,
    "copy": _same,
    "copy_p": _same,
    "device_put": _same,
    "name": _same,
    "optimization_barrier": _same,
    "pvary": _same,
    "reshape": _reshape,
    "sharding_constraint": _same,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
