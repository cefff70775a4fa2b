"""Operations linear in a piece of a parameter, followed as it moves, and the outer products each adds to the gradient.

Pieces of parameters within an array, followed through operations that only move elements.
Every axis of a piece is a product of factors. A factor walks along one axis of the parameter with a stride. So axes can
be split, joined, exchanged and cut, and at the end the factors say which box of the parameter the piece is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Var
from jax.lax import GatherScatterMode

from gradclip._src.private.ghost.records import Dense, Embedding, MatrixPlace, Use

T = TypeVar("T")


class NotFollowedError(Exception):
    """The elements of a parameter are moved in a way that is not followed."""


class Factor(NamedTuple):
    """`size` steps of `stride` along an axis of the parameter. Axis -1 is no axis of it: `stride` is then a name."""

    axis: int
    stride: int
    size: int


Factors = tuple[Factor, ...]


@dataclass(frozen=True)
class Piece:
    """A piece of parameter `leaf` that begins at `offset` in an array, and at `start` in the parameter.

    `loops` has an entry for each enclosing loop: the factors that the loop goes through, or () if it does not.
    """

    leaf: int
    start: tuple[int, ...]
    axes: tuple[Factors, ...]
    offset: tuple[int, ...]
    loops: tuple[Factors, ...] = ()

    @classmethod
    def whole(cls, leaf: int, shape: Sequence[int]) -> Piece:
        """Return the piece that is a whole parameter."""
        axes = tuple(_long([Factor(axis, 1, size)]) for axis, size in enumerate(shape))
        return cls(leaf, (0,) * len(shape), axes, (0,) * len(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(map(length, self.axes))

    @property
    def elements(self) -> int:
        """The number of elements, in all steps of the enclosing loops."""
        return math.prod(map(length, (*self.axes, *self.loops)))

    def transposed(self, order: Sequence[int]) -> Piece:
        """Return the piece with its axes in another order."""
        return replace(self, axes=_taken(self.axes, order), offset=_taken(self.offset, order))

    def spread(self, ndim: int, places: Sequence[int]) -> Piece:
        """Return the piece with axis i at `places[i]` of `ndim` axes, and axes of length 1 between."""
        found = dict(zip(places, zip(self.axes, self.offset, strict=True), strict=True))
        axes, offset = zip(*(found.get(i, ((), 0)) for i in range(ndim)), strict=True) if ndim else ((), ())
        return replace(self, axes=axes, offset=offset)

    def without(self, dropped: Sequence[int]) -> Piece:
        """Return the piece without these axes, which have length 1."""
        return self.transposed([i for i in range(len(self.axes)) if i not in dropped])

    def reshaped(self, shape: Sequence[int], new: Sequence[int]) -> Piece:
        """Return the piece after a reshape of its array from `shape` to `new`."""
        kept = [i for i, size in enumerate(shape) if size != 1]
        places = [i for i, size in enumerate(new) if size != 1]
        if [shape[i] for i in kept] == [new[i] for i in places]:
            return self.transposed(kept).spread(len(new), places)
        if self.shape != tuple(shape):
            raise NotFollowedError
        return replace(self, axes=_regrouped(self.axes, new), offset=(0,) * len(new))

    def cut(self, axis: int, start: int, stop: int) -> Piece | None:
        """Return what is left after a slice of its array along one axis; None if nothing is."""
        begins = self.offset[axis]
        first, last = max(start - begins, 0), min(stop - begins, length(self.axes[axis]))
        if last <= first:
            return None
        factors, moved = _cut(self.axes[axis], first, last)
        begin = tuple(at + moved.get(i, 0) for i, at in enumerate(self.start))
        return replace(self, start=begin, axes=_put(self.axes, axis, factors)).moved(axis, max(begins - start, 0))

    def moved(self, axis: int, to: int) -> Piece:
        """Return the piece at another offset."""
        return replace(self, offset=_put(self.offset, axis, to))

    def looped(self, level: int, size: int) -> Piece:
        """Return one step of a loop over axis 0, which is the loop at this level."""
        if self.offset[0] or length(self.axes[0]) != size:
            raise NotFollowedError
        loops = (*self.loops, *[()] * (level - len(self.loops)), self.axes[0])
        return replace(self, axes=self.axes[1:], offset=self.offset[1:], loops=loops)


def length(factors: Factors) -> int:
    """Return the length of an axis that is a product of factors."""
    return math.prod(factor.size for factor in factors)


def split(factors: Factors, outer: int) -> tuple[Factors, Factors]:
    """Return the factors of an axis as those of its outer `outer` steps, and the rest."""
    first, second = _regrouped((factors,), (outer, length(factors) // max(outer, 1)))
    return first, second


def _long(factors: Sequence[Factor]) -> Factors:
    return tuple(factor for factor in factors if factor.size != 1)


def _taken(values: Sequence[T], order: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in order)


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _regrouped(axes: Sequence[Factors], shape: Sequence[int]) -> tuple[Factors, ...]:
    """Return the factors of the axes after a reshape, which keeps their order."""
    rest = _joined([factor for axis in axes for factor in axis])[::-1]
    new = []
    for size in shape:
        group: list[Factor] = []
        while length(tuple(group)) != size:
            missing = size // length(tuple(group))
            if not rest or not missing or size % length(tuple(group)):
                raise NotFollowedError
            axis, stride, here = rest.pop()
            taken = here if missing % here == 0 else missing
            if here % taken:
                raise NotFollowedError
            group.append(Factor(axis, stride * (here // taken), taken))
            if taken != here:
                rest.append(Factor(axis, stride, here // taken))
        new.append(tuple(group))
    return tuple(new)


def _joined(factors: Sequence[Factor]) -> list[Factor]:
    """Return the factors with neighbors joined that walk on where the other ends."""
    joined: list[Factor] = []
    for factor in factors:
        last = joined[-1] if joined else None
        if last is not None and last.axis == factor.axis and last.stride == factor.stride * factor.size:
            joined[-1] = Factor(factor.axis, factor.stride, last.size * factor.size)
        else:
            joined.append(factor)
    return joined


def _cut(factors: Factors, start: int, stop: int) -> tuple[Factors, dict[int, int]]:
    """Return the factors of a part of an axis, and how far it begins along the axes of the parameter."""
    if start == 0 and stop == length(factors):
        return factors, {}
    axis, stride, _ = factors[0]
    inner = length(factors[1:])
    if start % inner == 0 and stop % inner == 0:
        first, last = start // inner, stop // inner
        return (*_long([Factor(axis, stride, last - first)]), *factors[1:]), {axis: first * stride}
    at = start // inner
    if at != (stop - 1) // inner:
        raise NotFollowedError
    rest, moved = _cut(factors[1:], start - at * inner, stop - at * inner)
    return rest, {**moved, axis: moved.get(axis, 0) + at * stride}


Labels = Sequence[Factors]  # for each axis of an array, the factors that it is a product of


def flat(labels: Labels) -> list[Factor]:
    """Return all factors in order, without those of length 1."""
    return [factor for factors in labels for factor in factors if factor.size != 1]


def place(piece: Piece, blocks: Sequence[Factor], rows: Sequence[Factor], columns: Sequence[Factor]) -> MatrixPlace:
    """Return the place of a piece whose factors are these. Raises NotFollowedError if the piece is not a box."""
    kind = {factor: name for name, group in zip("brc", (blocks, rows, columns), strict=True) for factor in group}
    factors = sorted(kind, key=_in_order)
    stop = []
    for axis, start in enumerate(piece.start):
        size = 1
        for factor in [one for one in factors if one.axis == axis][::-1]:
            if factor.stride != size:
                raise NotFollowedError
            size *= factor.size
        stop.append(start + size)
    groups = [(name, math.prod(one.size for one in group)) for name, group in groupby(factors, key=kind.__getitem__)]
    found = {name: tuple(i for i, (other, _) in enumerate(groups) if other == name) for name in "brc"}
    return MatrixPlace(piece.start, tuple(stop), tuple(size for _, size in groups), found["b"], found["r"], found["c"])


def first_of(rows: Sequence[Factor], columns: Sequence[Factor]) -> bool:
    """Say whether the outermost of these factors in the parameter is among `rows`."""
    outermost = min([*rows, *columns], key=_in_order, default=None)
    return outermost is None or outermost in rows


def ordered(factors: Sequence[Factor]) -> list[Factor]:
    """Return factors in their order in the parameter."""
    return sorted(factors, key=_in_order)


def arranged(array: Array, labels: Labels, *groups: Sequence[Factor]) -> Array:
    """Return the array with one axis for each group of factors."""
    factors = flat(labels)
    split = lax.reshape(array, [factor.size for factor in factors])
    turned = lax.transpose(split, [factors.index(factor) for group in groups for factor in group])
    return lax.reshape(turned, [math.prod(factor.size for factor in group) for group in groups])


def _in_order(factor: Factor) -> tuple[int, int]:
    return factor.axis, -factor.stride


Cuts = Mapping[int, tuple[int, int]]  # the part of an array that belongs to a piece: for each cut axis (start, stop)
Prepared = Callable[[Array, Array], tuple[Array, Array]]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Product:
    """A use of a parameter. `terms_of` makes the terms from operand number `kept` and the cotangent of the result."""

    leaf: int
    use: Use
    kept: int
    terms_of: Callable[[Array, Array], Dense | Embedding]


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


def _additions(piece: Piece, loops: Sequence[int]) -> int:
    """Return how many iterations of the enclosing loops use the same numbers of a piece."""
    through = [*piece.loops, *[()] * (len(loops) - len(piece.loops))]
    return math.prod(size for here, size in zip(through, loops, strict=True) if not here)


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
    name: str, piece: Piece, kept: int, loops: Sequence[int], inputs: Labels, results: Labels, prepared: Prepared
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

    use = Use(where, length(tuple(terms)), False, name, _additions(piece, loops))
    return Product(piece.leaf, use, kept, terms_of)


def of_dot_general(equation: JaxprEqn, side: int, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as the left (side 0) or right operand of a product of matrices."""
    other, (result,) = equation.invars[1 - side], equation.outvars
    if not is_floating(other, result):
        raise NotFollowedError
    in_other, in_result, counted = _axes_of_dot(equation, side)
    shape = other.aval.shape
    terms = dict(zip(counted, counting([shape[axis] for axis in counted]), strict=True))
    of_other = terms | {axis: piece.axes[own] for own, axis in in_other.items()}
    of_result = {axis: piece.axes[own] for own, axis in in_result.items()}
    of_result |= {axis: terms[theirs] for theirs, axis in counted.items()}
    cut, cut_result = _cuts(piece, in_other, shape), _cuts(piece, in_result, result.aval.shape)
    before = len(loops)
    return outer_products(
        "dot_general",
        piece,
        1 - side,
        loops,
        [of_other[axis] for axis in range(len(shape))],
        [of_result[axis] for axis in range(result.aval.ndim)],
        lambda x, e: (_within(x, cut, before), _within(e, cut_result, before)),
    )


def _axes_of_dot(equation: JaxprEqn, side: int) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return where the axes of one operand are in the other and in the result, and where the other's are in that."""
    contracted, batched = equation.params["dimension_numbers"]
    in_other = dict(zip(contracted[side] + batched[side], contracted[1 - side] + batched[1 - side], strict=True))
    bound = [(*contracted[i], *batched[i]) for i in (0, 1)]
    free = [(i, axis) for i in (0, 1) for axis in range(equation.invars[i].aval.ndim) if axis not in bound[i]]
    places = {key: len(batched[0]) + place for place, key in enumerate(free)}
    mine, theirs = ({axis: place for (i, axis), place in places.items() if i == which} for which in (side, 1 - side))
    return in_other, {axis: place for place, axis in enumerate(batched[side])} | mine, theirs


def _embedding(
    piece: Piece, axis: int, loops: Sequence[int], indices: Labels, results: Labels, prepared: Prepared
) -> Product:
    """Return a use of rows along an axis of the piece: `prepared` gives their numbers and cotangents."""
    before = _looped(piece, loops)
    indices, results = [*before, *indices], [*before, *results]
    rows, terms = flat([piece.axes[axis]]), flat(indices)
    columns = ordered([one for one in flat(results) if one not in terms])
    if any(one.axis >= 0 for one in terms) or rows != ordered(rows) or any(piece.offset):
        raise NotFollowedError
    where = place(piece, (), rows, columns)

    def terms_of(x: Array, e: Array) -> Embedding:
        x, e = prepared(x, e)
        return Embedding(arranged(x, indices, terms), arranged(e, results, terms, columns))

    use = Use(where, length(tuple(terms)), True, "embedding", _additions(piece, loops))
    return Product(piece.leaf, use, 1, terms_of)


def of_gather(equation: JaxprEqn, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as a table of which rows, or some neighboring rows, are looked up."""
    numbers, (result,) = equation.params["dimension_numbers"], equation.outvars
    table, places = (value.aval.shape for value in equation.invars)
    sizes, named = equation.params["slice_sizes"], numbers.start_index_map
    cut = [axis for axis, size in enumerate(table) if sizes[axis] != size] or list(named[:1])
    whole = piece.shape == table and not numbers.operand_batching_dims and equation.params["mode"] in _MODES
    if not (whole and is_floating(result)) or len(cut) != 1 or cut[0] not in named:
        raise NotFollowedError
    (axis,) = cut
    *terms, window = counting([*places[:-1], sizes[axis]])
    kept = [i for i in range(len(table)) if i not in numbers.collapsed_slice_dims]
    count, rest = iter(terms), iter([window if i == axis else piece.axes[i] for i in kept])
    results = [next(rest if i in numbers.offset_dims else count) for i in range(result.aval.ndim)]
    return _embedding(piece, axis, loops, [*terms, window], results, _looked_up(equation, axis, len(loops)))


def _looked_up(equation: JaxprEqn, axis: int, loops: int) -> Prepared:
    """Return the function from indices and cotangents of a lookup to rows of the table and their cotangents."""
    numbers, table = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    sizes, named = equation.params["slice_sizes"], numbers.start_index_map
    last = [table[i] - sizes[i] for i in named]
    lookups = [loops + i for i in range(equation.outvars[0].aval.ndim) if i not in numbers.offset_dims]

    def prepared(x: Array, e: Array) -> tuple[Array, Array]:
        inside = jnp.clip(x, 0, jnp.asarray(np.minimum(last, jnp.iinfo(x.dtype).max), x.dtype))
        first = inside[..., named.index(axis)].astype(jnp.int32)
        rows = first[..., None] + jnp.arange(sizes[axis], dtype=jnp.int32)
        if equation.params["mode"] == GatherScatterMode.CLIP:
            return rows, e
        # The gradient of a row outside the table reaches no row.
        valid = lax.broadcast_in_dim(jnp.all(inside == x, -1), e.shape, (*range(loops), *lookups))
        return rows, jnp.where(valid, e, jnp.zeros_like(e))

    return prepared


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
