"""Operations that are linear in a parameter: which outer products each of them adds to the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Var
from jax.lax import GatherScatterMode

from gradclip.per_example.ghost.jax_places import Labels, arranged, first_of, flat, ordered, place
from gradclip.per_example.ghost.jax_views import Factor, Factors, NotFollowedError, Piece, length
from gradclip.per_example.ghost.records import Dense, Rows, Use

Cuts = Mapping[int, tuple[int, int]]  # the part of an array that belongs to a piece: for each cut axis (start, stop)
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Product:
    """A use of a parameter. `terms_of` makes the terms from operand number `kept` and the cotangent of the result."""

    leaf: int
    use: Use
    kept: int
    terms_of: Callable[[Array, Array], Dense | Rows]


def is_floating(*values: Var) -> bool:
    """Say whether values are of dtypes that factors may have."""
    return all(str(value.aval.dtype) in FLOATS for value in values)


def counting(sizes: Sequence[int], first: int = 0) -> list[Factors]:
    """Return a factor for each axis that only counts terms."""
    return [(Factor(-1, first + i, size),) for i, size in enumerate(sizes)]


def _looped(piece: Piece, loops: Sequence[int]) -> list[Factors]:
    """Return the factors of the axes that the enclosing loops add in front."""
    through = [*piece.loops, *[()] * (len(loops) - len(piece.loops))]
    counted = counting(loops, -len(loops))
    return [here if here or size == 1 else one for here, one, size in zip(through, counted, loops, strict=True)]


def _within(array: Array, cuts: Cuts, before: int) -> Array:
    """Return the part of an array. `before` axes come before those that `cuts` names."""
    for axis, (start, stop) in cuts.items():
        array = lax.slice_in_dim(array, start, stop, axis=before + axis)
    return array


def _cuts(piece: Piece, axes: Mapping[int, int], shape: Sequence[int]) -> Cuts:
    """Return the part of another array that belongs to a piece. `axes` maps axes of the piece to axes of the array."""
    ends = {theirs: (piece.offset[own], piece.offset[own] + piece.shape[own]) for own, theirs in axes.items()}
    return {axis: ends[axis] for axis in ends if ends[axis] != (0, shape[axis])}


def outer_products(
    name: str, piece: Piece, kept: int, loops: Sequence[int], inputs: Labels, results: Labels, prepared: Callable
) -> Product:
    """Return a sum of outer products of an input and a cotangent, whose axes are products of these factors."""
    inputs, results = [*_looped(piece, loops), *inputs], [*_looped(piece, loops), *results]
    here, there = flat(inputs), flat(results)
    blocks = ordered([one for one in here if one in there and one.axis >= 0])
    terms = [one for one in here if one.axis < 0]
    mine = ordered([one for one in here if one not in there])
    theirs = ordered([one for one in there if one not in here])
    leads = first_of(mine, theirs)
    where = place(piece, blocks, mine, theirs) if leads else place(piece, blocks, theirs, mine)

    def terms_of(x: Array, e: Array) -> Dense:
        x, e = prepared(x, e)
        sides = arranged(x, inputs, blocks, terms, mine), arranged(e, results, blocks, terms, theirs)
        return Dense(*(sides if leads else sides[::-1]))

    return Product(piece.leaf, Use(where, length(tuple(terms)), False, name), kept, terms_of)


def of_dot_general(equation: JaxprEqn, side: int, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as the left (side 0) or right operand of a product of matrices."""
    own, other = equation.invars[side], equation.invars[1 - side]
    (result,) = equation.outvars
    if not is_floating(other, result):
        raise NotFollowedError
    contracted, batched = equation.params["dimension_numbers"]
    pairs = dict(zip(contracted[side], contracted[1 - side], strict=True))
    batches = dict(zip(batched[side], batched[1 - side], strict=True))
    in_other = {theirs: mine for mine, theirs in (pairs | batches).items()}
    free = [axis for axis in range(own.aval.ndim) if axis not in pairs and axis not in batches]
    shape = other.aval.shape
    rest = [axis for axis in range(len(shape)) if axis not in in_other]
    terms = dict(zip(rest, counting([shape[axis] for axis in rest]), strict=True))
    inputs = [piece.axes[in_other[axis]] if axis in in_other else terms[axis] for axis in range(len(shape))]
    owned, counted = [piece.axes[axis] for axis in free], [terms[axis] for axis in rest]
    results = [*(piece.axes[axis] for axis in batches), *(owned + counted if side == 0 else counted + owned)]
    begin = len(batches) + (0 if side == 0 else len(rest))
    in_result = {axis: i for i, axis in enumerate(batches)} | {axis: begin + i for i, axis in enumerate(free)}
    of_input = _cuts(piece, pairs | batches, shape)
    of_result = _cuts(piece, in_result, result.aval.shape)
    before = len(loops)

    def prepared(x: Array, e: Array) -> tuple[Array, Array]:
        return _within(x, of_input, before), _within(e, of_result, before)

    return outer_products("dot_general", piece, 1 - side, loops, inputs, results, prepared)


def _embedding(
    piece: Piece, axis: int, loops: Sequence[int], indices: Labels, results: Labels, prepared: Callable
) -> Product:
    """Return a use of rows along an axis of the piece: `prepared` gives their numbers and cotangents."""
    before = _looped(piece, loops)
    indices, results = [*before, *indices], [*before, *results]
    rows, terms = flat([piece.axes[axis]]), flat(indices)
    columns = ordered([one for one in flat(results) if one not in terms])
    if any(one.axis >= 0 for one in terms) or rows != ordered(rows) or any(piece.offset):
        raise NotFollowedError
    where = place(piece, (), rows, columns)

    def terms_of(x: Array, e: Array) -> Rows:
        x, e = prepared(x, e)
        return Rows(arranged(x, indices, terms), arranged(e, results, terms, columns))

    return Product(piece.leaf, Use(where, length(tuple(terms)), True, "embedding"), 1, terms_of)


def of_gather(equation: JaxprEqn, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as a table of which rows, or some neighboring rows, are looked up."""
    numbers, (result,) = equation.params["dimension_numbers"], equation.outvars
    table, places = (value.aval.shape for value in equation.invars)
    sizes, mode, named = equation.params["slice_sizes"], equation.params["mode"], numbers.start_index_map
    cut = [axis for axis, size in enumerate(table) if sizes[axis] != size] or list(named[:1])
    whole = piece.shape == table and not numbers.operand_batching_dims
    if not (whole and is_floating(result)) or mode not in _MODES or len(cut) != 1 or cut[0] not in named:
        raise NotFollowedError
    (axis,) = cut
    *terms, window = counting([*places[:-1], sizes[axis]])
    kept = [i for i in range(len(table)) if i not in numbers.collapsed_slice_dims]
    count, rest = iter(terms), iter([window if i == axis else piece.axes[i] for i in kept])
    results = [next(rest if i in numbers.offset_dims else count) for i in range(result.aval.ndim)]
    is_term = [i for i in range(result.aval.ndim) if i not in numbers.offset_dims]
    last = [table[i] - sizes[i] for i in named]

    def prepared(x: Array, e: Array) -> tuple[Array, Array]:
        inside = jnp.clip(x, 0, jnp.asarray(np.minimum(last, jnp.iinfo(x.dtype).max), x.dtype))
        first = inside[..., named.index(axis)].astype(jnp.int32)
        found = first[..., None] + jnp.arange(sizes[axis], dtype=jnp.int32)
        if mode == GatherScatterMode.CLIP:
            return found, e
        # The gradient of a row outside the table reaches no row.
        axes = (*range(len(loops)), *(len(loops) + i for i in is_term))
        valid = lax.broadcast_in_dim(jnp.all(inside == x, -1), e.shape, axes)
        return found, jnp.where(valid, e, jnp.zeros_like(e))

    return _embedding(piece, axis, loops, [*terms, window], results, prepared)


_MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)


def of_dynamic_slice(equation: JaxprEqn, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as a table of which some neighboring rows are taken."""
    (result,), sizes = equation.outvars, equation.params["slice_sizes"]
    table = equation.invars[0].aval.shape
    cut = [axis for axis, size in enumerate(table) if sizes[axis] != size]
    if len(cut) != 1 or piece.shape != table or not is_floating(result):
        raise NotFollowedError
    (axis,) = cut
    (terms,) = counting([sizes[axis]])
    results = [terms if i == axis else factors for i, factors in enumerate(piece.axes)]

    def prepared(x: Array, e: Array) -> tuple[Array, Array]:
        first = jnp.clip(x, 0, table[axis] - sizes[axis]).astype(jnp.int32)
        return first[..., None] + jnp.arange(sizes[axis], dtype=jnp.int32), e

    found = _embedding(piece, axis, loops, [terms], results, prepared)
    return Product(found.leaf, found.use, 1 + axis, found.terms_of)
