"""Find every use of parameters in the program of one example, without computing anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from gradclip._src.private.ghost.jax.products import (
    NotFollowedError,
    Piece,
    Product,
    counting,
    is_floating,
    of_dot_general,
    of_dynamic_slice,
    of_gather,
    outer_products,
    split,
)
from gradclip._src.private.ghost.records import MatrixPlace


def applied(program: Jaxpr, equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of an equation of a program."""
    # A program of one equation keeps its settings, whatever they are in this version of JAX.
    given = {value: x for value, x in zip(equation.invars, inputs, strict=True) if isinstance(value, Var)}
    parts = {"constvars": [], "invars": list(given), "outvars": equation.outvars, "eqns": [equation]}
    alone = program.replace(**parts, effects=equation.effects)
    found: list[Any] = jaxpr_as_fun(ClosedJaxpr(alone, []))(*given.values())
    return found


def differentiated(program: Jaxpr, wanted: Sequence[bool]) -> tuple[set[int], set[Var]]:
    """Return the numbers of the equations, and the variables, on which a derivative of the wanted results depends."""
    values = {value for value, flag in zip(program.outvars, wanted, strict=True) if flag and is_real(value)}
    found = set()
    for i, equation in reversed(list(enumerate(program.eqns))):
        if values.intersection(equation.outvars) and equation.primitive.name != "stop_gradient":
            found.add(i)
            values.update(filter(is_real, equation.invars))
    return found, values


def is_real(value: Var | Literal) -> bool:
    """Say whether a value is a variable that has a derivative."""
    return isinstance(value, Var) and bool(jnp.issubdtype(value.aval.dtype, jnp.inexact))


def inner(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program that an equation only calls, if it does."""
    if equation.primitive.name not in _CALLS:
        return None
    program = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"}


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


def of_convolution(equation: JaxprEqn, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece as the kernel of a convolution: one term for each position of the result."""
    settings, (result,) = equation.params, equation.outvars
    inputs, kernel = equation.invars
    numbers, groups = settings["dimension_numbers"], settings["feature_group_count"]
    is_whole = piece.shape == kernel.aval.shape and not any(piece.offset)
    if not is_whole or settings["batch_group_count"] != 1 or not is_floating(inputs, result):
        raise NotFollowedError
    features, channels, *window = (piece.axes[axis] for axis in numbers.rhs_spec)
    blocks, features = split(features, groups)
    rows, *places = counting([result.aval.shape[axis] for axis in (numbers.out_spec[0], *numbers.out_spec[2:])])
    of_result = dict(zip(numbers.out_spec, [rows, (*blocks, *features), *places], strict=True))

    def patches(x: Array) -> Array:
        return _patches(equation, x)

    for _ in loops:
        patches = jax.vmap(patches)
    return outer_products(
        equation.primitive.name,
        piece,
        0,
        loops,
        [rows, (*blocks, *channels), *window, *places],
        [of_result[axis] for axis in range(result.aval.ndim)],
        lambda x, e: (patches(x), e),
    )


def _patches(equation: JaxprEqn, x: Array) -> Array:
    """Return what each element of the kernel is multiplied with: shape (batch, channels, *kernel, *result).

    Each is a slice of the padded input. A convolution with ones would multiply a NaN with zeros.
    """
    settings, numbers = equation.params, equation.params["dimension_numbers"]
    kernel = [equation.invars[1].aval.shape[axis] for axis in numbers.rhs_spec[2:]]
    found = [equation.outvars[0].aval.shape[axis] for axis in numbers.out_spec[2:]]
    strides, steps = settings["window_strides"], settings["rhs_dilation"]
    x = lax.transpose(x, numbers.lhs_spec)
    edges = [(*ends, gap - 1) for ends, gap in zip(settings["padding"], settings["lhs_dilation"], strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    slices = []
    for place in itertools.product(*map(range, kernel)):
        starts = np.multiply(place, steps)
        stops = starts + np.multiply(np.subtract(found, 1), strides) + 1
        slices.append(lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *strides)))
    return jnp.stack(slices, 2).reshape(*x.shape[:2], *kernel, *found)


@dataclass(frozen=True)
class Tap:
    """An equation whose result has a cotangent to keep, and the uses for which it is kept.

    The shape is that of the result, after the lengths of the loops around it.
    """

    products: tuple[Product, ...]
    shape: tuple[int, ...]
    dtype: Any


Taps = dict[int, "Tap | Taps"]
"""The taps in a program by the number of the equation; for an equation that holds a program, those in there."""


def taps_in(taps: Taps) -> Iterator[Tap]:
    """Return all taps in the order of the program."""
    for _, one in sorted(taps.items()):
        yield from [one] if isinstance(one, Tap) else taps_in(one)


@dataclass
class Finder:
    """Find the uses of parameters. `reasons` gets the operation for each parameter that cannot be tapped."""

    reasons: dict[int, str] = field(default_factory=dict)
    of_example: set[int] = field(default_factory=set)  # the identities of constants that an example has its own of
    added: set[int] = field(default_factory=set)  # parameters whose only uses add them to values of an example
    elements: dict[int, int] = field(default_factory=dict)

    def of_program(self, closed: ClosedJaxpr, parameters: Mapping[int, int], results: int) -> Taps:
        """Return the taps of a program. `parameters`: the parameter at each input that is one.

        Only the first `results` results have a derivative.
        """
        inputs = closed.jaxpr.invars
        self.elements |= {leaf: math.prod(inputs[i].aval.shape) for i, leaf in parameters.items()}
        given = [
            (Piece.whole(parameters[i], value.aval.shape),) if i in parameters else () for i, value in enumerate(inputs)
        ]
        wanted = [i < results for i in range(len(closed.jaxpr.outvars))]
        walk = _Walk(self, closed, ())
        returned = walk.through(given, [None] * len(inputs), wanted, [False] * len(inputs))
        for pieces in returned[:results]:
            self.give_up(pieces, "a parameter is the result")
        uses = [product for tap in taps_in(walk.taps) for product in tap.products]
        self._compare(uses)
        self.added -= {product.leaf for product in uses}
        return walk.taps

    def give_up(self, pieces: Pieces, reason: str, *, adds: bool = False) -> None:
        """Note the operation for which these parameters cannot be tapped. `adds`: it adds them to an example's values.

        What such an operation uses must be most of a parameter.
        """
        for piece in pieces:
            fine = adds and 2 * piece.elements >= self.elements[piece.leaf]
            if fine and piece.leaf not in self.reasons:
                self.added.add(piece.leaf)
            elif not fine and piece.leaf in self.added:
                self.added.discard(piece.leaf)
                self.reasons[piece.leaf] = reason
            self.reasons.setdefault(piece.leaf, reason)

    def _compare(self, uses: Sequence[Product]) -> None:
        """Give up the parameters whose uses overlap without being alike."""
        places: dict[int, dict[MatrixPlace, str]] = {}
        for product in uses:
            places.setdefault(product.leaf, {}).setdefault(product.use.place, product.use.operation)
        for leaf, found in places.items():
            every = list(found)
            overlapping = [found[b] for i, b in enumerate(every) if any(_overlap(a, b) for a in every[:i])]
            if overlapping:
                self.reasons.setdefault(leaf, f"{overlapping[0]} of overlapping parts")


def _overlap(a: MatrixPlace, b: MatrixPlace) -> bool:
    return all(max(x, y) < min(u, v) for x, y, u, v in zip(a.start, b.start, a.stop, b.stop, strict=True))


@dataclass
class _Walk:
    """The walk through one program, within loops of these lengths."""

    finder: Finder
    closed: ClosedJaxpr
    loops: tuple[int, ...]
    taps: Taps = field(default_factory=dict)
    pieces: dict[Var, Pieces] = field(default_factory=dict)
    numbers: dict[Var, int] = field(default_factory=dict)  # integers that are known already
    used: set[Var] = field(default_factory=set)  # what a derivative of the wanted results depends on
    own: set[Var] = field(default_factory=set)  # what depends on the example

    def through(
        self, given: Sequence[Pieces], numbers: Sequence[int | None], wanted: Sequence[bool], own: Sequence[bool]
    ) -> list[Pieces]:
        """Go through the program, and return the pieces in its results. `own`: which inputs depend on the example."""
        program = self.closed.jaxpr
        for value, pieces, number in zip(program.invars, given, numbers, strict=True):
            self._note(value, pieces, number)
        for value, constant in zip(program.constvars, self.closed.consts, strict=True):
            self._note(value, (), _number(constant))
        self.own.update(value for value, flag in zip(program.invars, own, strict=True) if flag)
        constants = zip(program.constvars, self.closed.consts, strict=True)
        self.own.update(value for value, constant in constants if id(constant) in self.finder.of_example)
        live, self.used = differentiated(program, wanted)
        for i, equation in enumerate(program.eqns):
            inputs = [self.pieces_of(value) for value in equation.invars]
            if any(map(self.is_own, equation.invars)):
                self.own.update(equation.outvars)
            if i in live and any(inputs):
                try:
                    found = self._followed(i, equation, inputs)
                except NotFollowedError:
                    self.finder.give_up(tuple(chain(*inputs)), equation.primitive.name)
                    continue
                for value, after in zip(equation.outvars, found, strict=True):
                    self._note(value, after, None)
            else:
                self._compute(equation)
        return [self.pieces_of(value) for value in program.outvars]

    def pieces_of(self, value: Var | Literal) -> Pieces:
        return self.pieces.get(value, ()) if isinstance(value, Var) else ()

    def is_own(self, value: Var | Literal) -> bool:
        return isinstance(value, Var) and value in self.own

    def number_of(self, value: Var | Literal) -> int | None:
        return self.numbers.get(value) if isinstance(value, Var) else _number(value.val)

    def _note(self, value: Var, pieces: Pieces, number: int | None) -> None:
        if pieces and is_real(value):
            self.pieces[value] = pieces
        if number is not None:
            self.numbers[value] = number

    def _compute(self, equation: JaxprEqn) -> None:
        """Note the integer that an equation computes, if its inputs are known."""
        inputs = [self.number_of(value) for value in equation.invars]
        folded = _FOLDED.get(equation.primitive.name)
        if folded is not None and inputs and all(x is not None for x in inputs):
            (result,) = equation.outvars
            self.numbers[result] = int(np.array(folded(*inputs)).astype(result.aval.dtype))

    def _followed(self, i: int, equation: JaxprEqn, pieces: Sequence[Pieces]) -> Sequence[Pieces]:
        """Return the pieces in the results of an equation, and note its taps."""
        name = equation.primitive.name
        if name in MOVES:
            return MOVES[name](equation, pieces)
        if name == "dynamic_slice" and (starts := [self.number_of(value) for value in equation.invars[1:]]):
            known = [start for start in starts if start is not None]
            if len(known) == len(starts):
                return [sliced_at(equation, pieces[0], known)]
        if name == "scan":
            return self._through_scan(i, equation, pieces)
        program = inner(equation)
        if program is not None:
            numbers = [self.number_of(value) for value in equation.invars]
            wanted = [value in self.used for value in equation.outvars]
            own = list(map(self.is_own, equation.invars))
            return self._within(i, program, self.loops, pieces, numbers, wanted, own)
        products = []
        for side, piece in [(side, piece) for side, given in enumerate(pieces) for piece in given]:
            try:
                products.append(_product(equation, side, piece, self.loops))
            except NotFollowedError:
                adds = name in _ADDITIONS and self.is_own(equation.invars[1 - side])
                self.finder.give_up((piece,), name, adds=adds)
        if products:
            (result,) = equation.outvars
            self.taps[i] = Tap(tuple(products), (*self.loops, *result.aval.shape), result.aval.dtype)
        return [()] * len(equation.outvars)

    def _within(
        self,
        i: int,
        program: ClosedJaxpr,
        loops: tuple[int, ...],
        pieces: Sequence[Pieces],
        numbers: Sequence[int | None],
        wanted: Sequence[bool],
        own: Sequence[bool],
    ) -> list[Pieces]:
        """Return the pieces in the results of a program within equation `i`, and note its taps."""
        walk = _Walk(self.finder, program, loops)
        found = walk.through(pieces, numbers, wanted, own)
        if walk.taps:
            self.taps[i] = walk.taps
        return found

    def _through_scan(self, i: int, equation: JaxprEqn, pieces: Sequence[Pieces]) -> list[Pieces]:
        """Go through the body of a loop. A parameter may be constant there, or the loop may go over its axis 0."""
        settings, body = equation.params, equation.params["jaxpr"]
        first, count = settings["num_consts"], settings["num_carry"]
        pairs = zip(body.jaxpr.outvars[:count], body.jaxpr.invars[first : first + count], strict=True)
        stays = [True] * first + [after is before for after, before in pairs]
        given = list(pieces)
        for k, here in enumerate(pieces):
            if k >= len(stays):
                given[k] = tuple(piece.looped(len(self.loops), settings["length"]) for piece in here)
            elif not stays[k]:
                self.finder.give_up(here, "scan")
                given[k] = ()
        numbers = [self.number_of(value) if k < first else None for k, value in enumerate(equation.invars)]
        wanted = [k < count or value in self.used for k, value in enumerate(equation.outvars)]
        # What a loop carries depends on the example if anything does that goes into it.
        own = [self.is_own(value) for value in equation.invars]
        own = [flag or (first <= k < first + count and any(own)) for k, flag in enumerate(own)]
        found = self._within(i, body, (*self.loops, settings["length"]), given, numbers, wanted, own)
        for k, here in enumerate(found):
            if k >= count or not stays[first + k]:
                self.finder.give_up(here, "scan")
                found[k] = ()
        return found


def _product(equation: JaxprEqn, side: int, piece: Piece, loops: Sequence[int]) -> Product:
    """Return the use of a piece in one operand of an equation."""
    name = equation.primitive.name
    if name == "dot_general":
        return of_dot_general(equation, side, piece, loops)
    if name == "conv_general_dilated" and side == 1:
        return of_convolution(equation, piece, loops)
    if name in _LOOKUPS and side == 0:
        return _LOOKUPS[name](equation, piece, loops)
    raise NotFollowedError


_ADDITIONS = ("add", "sub", "add_any")
_LOOKUPS = {"gather": of_gather, "dynamic_slice": of_dynamic_slice}


def _number(x: object) -> int | None:
    """Return an integer whose value is known."""
    if isinstance(x, bool | int | np.bool_ | np.integer):
        return int(x)
    return int(x) if isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype.kind in "biu" else None


_FOLDED: dict[str, Callable[..., int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "lt": lambda x, y: int(x < y),
    "select_n": lambda which, *cases: cases[which],
    "convert_element_type": lambda x: x,
}
