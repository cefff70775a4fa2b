"""Examples that break careless sums, and an attack on sums over batches: `check_sensitivity` feeds them to a function.

Here an example is a float64 vector of all elements of its gradient, each within the range of its own dtype.

The attack: a loss with a kink exactly at its predictions.
The gradient of loss(w, x, y) = |x @ w - y| is x or -x, or zero at the kink. The last bit of x @ w decides which. That
bit can depend on the number of examples in the batch, and on the place of an example among them, mostly if w is a
matrix. One example then moves the gradient of each of the others by up to twice the threshold. If all rows are
multiples of one vector, all move in the same direction.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.annotations import Relation
from gradclip._src.backends.registry import framework_of
from gradclip._src.core.formats import Format
from gradclip._src.core.values import Array
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.sums.rounding import root_up
from gradclip._src.tree import flatten

Vector = np.ndarray


@dataclass(frozen=True)
class Room:
    """The limits of an example: for each element, the `step` and the `largest` number of its dtype.

    `threshold` is the norm to which examples are presumably clipped; `roundoff` is the largest of all dtypes.
    """

    threshold: float
    roundoff: float
    step: Vector
    largest: Vector

    @classmethod
    def of(cls, sizes: Sequence[int], formats: Sequence[Format], threshold: float) -> "Room":
        """Return the limits of an example with arrays of these sizes and formats."""
        largest = [(2.0 - 2.0 ** (1 - f.precision)) * 2.0 ** (f.max_exponent - 1) for f in formats]
        steps = [f.step for f in formats]
        roundoff = max(f.roundoff for f in formats)
        return cls(threshold or 1.0, roundoff, np.repeat(steps, sizes), np.repeat(largest, sizes))

    def within(self, values: Vector) -> Vector:
        """Return the values, with finite ones limited to the largest number of their dtype."""
        return np.where(np.isinf(values), values, np.clip(values, -self.largest, self.largest))

    def direction(self, rng: np.random.Generator) -> Vector:
        """Return a random vector of norm 1."""
        values = rng.normal(size=self.step.size)
        return values / max(math.sqrt(float(values @ values)), 1e-300)

    def signs(self, rng: np.random.Generator) -> Vector:
        """Return ones of random sign."""
        return rng.choice([-1.0, 1.0], size=self.step.size)


def _ordinary(rng: np.random.Generator, room: Room) -> Vector:
    return room.direction(rng) * room.threshold * 10.0 ** rng.uniform(-1, 1)


def _squares_underflow(rng: np.random.Generator, room: Room) -> Vector:
    """Return numbers with squares below half the smallest number of the dtype."""
    return room.signs(rng) * np.sqrt(room.step) * rng.uniform(0.25, 0.7, room.step.size)


def _at_threshold(rng: np.random.Generator, room: Room) -> Vector:
    return room.direction(rng) * room.threshold * (1 + rng.integers(-1, 3) * room.roundoff)


def _with_one(rng: np.random.Generator, values: Vector, element: float) -> Vector:
    if values.size:
        values[rng.integers(values.size)] = element
    return values


KINDS: dict[str, Callable[[np.random.Generator, Room], Vector]] = {
    "ordinary numbers": _ordinary,
    "norm at the threshold": _at_threshold,
    "far above the threshold": lambda rng, room: room.direction(rng) * room.threshold * 1e4,
    "one large element": lambda rng, room: _with_one(rng, np.zeros(room.step.size), 10 * room.threshold),
    "zeros": lambda rng, room: np.zeros(room.step.size),
    "one NaN": lambda rng, room: _with_one(rng, _ordinary(rng, room), math.nan),
    "nothing but NaN": lambda rng, room: np.full(room.step.size, math.nan),
    "one infinity": lambda rng, room: _with_one(rng, _ordinary(rng, room), rng.choice([-math.inf, math.inf])),
    "largest numbers": lambda rng, room: room.signs(rng) * room.largest * rng.uniform(0.5, 1, room.step.size),
    "squares overflow": lambda rng, room: room.signs(rng) * np.sqrt(room.largest) * rng.uniform(1, 4, room.step.size),
    "squares underflow": _squares_underflow,
    "subnormal numbers": lambda rng, room: room.signs(rng) * room.step * rng.integers(1, 100, room.step.size),
    "all magnitudes": lambda rng, room: room.signs(rng) * 2.0 ** rng.uniform(np.log2(room.step), np.log2(room.largest)),
}


def _random(rng: np.random.Generator, room: Room, count: int, example: Vector) -> Vector:
    return np.stack([_ordinary(rng, room) for _ in range(count)])


def _alike(rng: np.random.Generator, room: Room, count: int, example: Vector) -> Vector:
    """Return examples that point in the direction of this one, all above the threshold."""
    largest = np.max(np.abs(example), initial=0.0)
    shape = example / largest if 0 < largest < math.inf else room.direction(rng)
    length = math.sqrt(float(shape @ shape)) or 1.0
    return rng.uniform(1, 2, count)[:, None] * (room.threshold / length * shape)


def _opposite(rng: np.random.Generator, room: Room, count: int, example: Vector) -> Vector:
    return -_alike(rng, room, count, example)


CROWDS: dict[str, Callable[[np.random.Generator, Room, int, Vector], Vector]] = {
    "zeros": lambda rng, room, count, example: np.zeros((count, room.step.size)),
    "random examples": _random,
    "examples like it": _alike,
    "opposite examples": _opposite,
}


_OUTPUTS = 10
_FEATURES = 257
_SIZES = (2, 4, 8)  # sizes at which libraries switch to a different kind of program
_DRAWS, _PATIENCE = 8, 1
_BARE: dict[str, Any] = {
    "argnums": 0,
    "keep_batch_dim": False,
    "return_values": False,
    "return_norms": False,
    "prng_argnum": None,
    "_assumed": False,
}


def threshold_of(clipped: ClippedFunction) -> float:
    """Return the norm to which an example is clipped, over all its thresholds."""
    return root_up(sum((Fraction(float(c)) ** 2 for c in flatten(clipped.max_norm).leaves), Fraction(0)))


def step_of(clipped: ClippedFunction) -> Fraction:
    """Return the unit of the result, in units of the gradients: one, or a step of the grid."""
    grid = clipped._settings.grid
    return Fraction(1) if grid is None else Fraction(threshold_of(clipped)) / grid


def sizes(clipped: ClippedFunction, count: int) -> list[int]:
    """Return the batch sizes to try with `count` examples."""
    most = min(count, clipped.pad_to or count)
    return sorted({min(size, most) for size in (*_SIZES, most)})


def combinations(
    clipped: ClippedFunction, count: int, relation: Relation
) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Yield what to try with `count` examples: a batch size, the name of a change, and the shape of the predictions."""
    *few, most = sizes(clipped, count)
    first, *others = REMOVING if relation == "add_or_remove_one" else IN_PLACE
    yield from ((size, first, ()) for size in few)
    yield from ((most, name, outputs) for outputs in ((), (_OUTPUTS,)) for name in (first, *others))


def of_gradients(clipped: ClippedFunction, zeros_like_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the clipped sum as a function of given gradients, through a loss that is linear in its parameters."""
    multiplied = _times_in_factors if clipped.method == "ghost" else _times

    def loss(params: Any, grads: Any) -> Any:
        pairs = zip(flatten(params).leaves, flatten(grads).leaves, strict=True)
        return sum(multiplied(_namespace(p), p, g) for p, g in pairs)

    made = replace(clipped, fun=loss, batch_argnums=(1,), has_aux=False, **_BARE)

    def function(grads: Any) -> Any:
        flat = flatten(grads)
        return made(flat.rebuild(list(map(zeros_like_one, flat.leaves))), grads)

    return function


def _times(xp: ModuleType, parameter: Array, gradient: Array) -> Array:
    return xp.sum(parameter * gradient)


def _times_in_factors(xp: ModuleType, parameter: Array, gradient: Array) -> Array:
    """Return the same through products, so that the gradient comes in factors, of which some cancel."""
    rows = parameter.shape[0] if parameter.ndim > 1 else 1
    matrix, cotangent = (xp.reshape(x, (rows, -1)) for x in (parameter, gradient))
    columns = matrix.shape[1]
    identity = xp.eye(min(rows, columns), dtype=parameter.dtype, device=getattr(parameter, "device", None))

    def once() -> Any:
        return xp.sum((identity @ matrix if rows <= columns else matrix @ identity) * cotangent)

    return once() - once() + once()


def kinked(clipped: ClippedFunction) -> ClippedFunction:
    """Return a copy that clips and sums the gradients of the loss with the kink."""

    def loss(w: Array, x: Array, y: Array) -> tuple[Array, Array]:
        xp = _namespace(x)
        predicted = xp.matmul(x, w)
        return xp.sum(abs(predicted - y)), predicted

    settings = replace(clipped._settings, max_norm=threshold_of(clipped))
    bare = _BARE | {"pre_clipping_transform": None}
    return replace(clipped, fun=loss, _settings=settings, batch_argnums=(1, 2), has_aux=True, **bare)


def _namespace(array: object) -> ModuleType:
    return framework_of(array).namespace  # type: ignore[union-attr]


class Change(NamedTuple):
    """How a batch differs from its neighbour, which holds the examples `order`, of which those in `counted` count.

    `emptied`: the example that becomes zeros, None if there is none.
    """

    order: np.ndarray
    counted: np.ndarray
    emptied: int | None = None

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the neighbour."""
        if self.emptied is not None:
            rows = rows.copy()
            rows[self.emptied] = 0.0
        return rows[self.order]


def _masked(size: int, index: int, rng: np.random.Generator) -> Change:
    return Change(np.arange(size), np.arange(size) != index)


def _emptied(size: int, index: int, rng: np.random.Generator) -> Change:
    return Change(np.arange(size), np.ones(size, bool), index)


def _removed(size: int, index: int, rng: np.random.Generator) -> Change:
    return Change(np.delete(np.arange(size), index), np.ones(size - 1, bool))


def _shuffled(size: int, index: int, rng: np.random.Generator) -> Change:
    removed = _removed(size, index, rng)
    return removed._replace(order=rng.permutation(removed.order))


_Changing = Callable[[int, int, np.random.Generator], Change]
REMOVING = ("removed", "removed and the rest shuffled", "masked out")
MOVING = REMOVING[:2]
IN_PLACE = ("made zeros",)
CHANGES: dict[str, _Changing] = dict(zip((*REMOVING, *IN_PLACE), (_removed, _shuffled, _masked, _emptied), strict=True))


@dataclass(frozen=True)
class Kinks:
    """The attack on `call(w, x, y, mask)`, which returns the sums for the kinked loss, and its predictions.

    `threshold`: that of one example. `outputs`: the shape of an example's predictions.
    """

    call: Callable[..., tuple[list[np.ndarray], np.ndarray]]
    dtype: Any
    threshold: float
    outputs: tuple[int, ...] = ()

    def tried(
        self, size: int, name: str, rng: np.random.Generator
    ) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Yield the sums over batches of `size` examples, and over those that the named change makes of them."""
        for index in (size - 1, 0):
            yield _Draw(self, size, index, CHANGES[name](size, index, rng), rng).sums()


class _Draw:
    """Rows that are multiples of one vector. The neighbour lacks one of them."""

    def __init__(self, kinks: Kinks, size: int, index: int, change: Change, rng: np.random.Generator) -> None:
        self.kinks, self.size, self.change, self.rng = kinks, size, change, rng
        self.others = np.arange(size) != index
        direction = rng.normal(size=_FEATURES)
        # Rows a little above the threshold, if its numbers are in range.
        direction *= np.clip(2.0 * kinks.threshold, 1e-20, 1e20) / np.linalg.norm(direction)
        self.direction = direction.astype(kinks.dtype)
        self.w = rng.normal(size=(_FEATURES, *kinks.outputs)).astype(kinks.dtype)
        self.lengths = self._lengths()

    def sums(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        for draw in range(_DRAWS):
            here, there = self._predicted()
            if draw == _PATIENCE and np.array_equal(here[self.others], there[self.others]):
                break  # this function does not depend on the change
            # A prediction depends on the row and its place. Redraw the rows that move in the wrong direction.
            moved = np.any((here < there).reshape(self.size, -1), axis=1)
            if moved[self.others].all():
                break
            self.lengths = np.where(moved, self.lengths, self._lengths())
        else:
            here, there = self._predicted()
        beyond = 2 * np.abs(here).max()
        labels = np.where(here < there, here / 2 + there / 2, beyond).astype(self.kinks.dtype)
        # Removing the row moves the sum in the same direction as the other rows do.
        labels[~self.others] = beyond
        return self._call(labels)[0], self._call_neighbour(labels)[0]

    def _lengths(self) -> np.ndarray:
        return self.rng.uniform(1, 2, self.size).astype(self.kinks.dtype)

    def _rows(self) -> np.ndarray:
        return self.lengths[:, None] * self.direction

    def _predicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the predictions for each example in the batch, and in its neighbour."""
        labels = np.zeros((self.size, *self.kinks.outputs), self.kinks.dtype)
        there = np.zeros_like(labels)
        there[self.change.order] = self._call_neighbour(labels)[1]
        return self._call(labels)[1], there

    def _call(self, labels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        return self.kinks.call(self.w, self._rows(), labels, np.ones(self.size, bool))

    def _call_neighbour(self, labels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        change = self.change
        return self.kinks.call(self.w, change.of(self._rows()), change.of(labels), change.counted)
