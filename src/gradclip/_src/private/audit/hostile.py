"""Examples that break careless sums. `check_sensitivity` feeds them to a function.

Here an example is a float64 vector of all elements of its gradient, each within the range of its own dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradclip._src.core.formats import Format

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


def _at_threshold(rng: np.random.Generator, room: Room) -> Vector:
    return room.direction(rng) * room.threshold * (1 + rng.integers(-1, 3) * room.roundoff)


def _far_above(rng: np.random.Generator, room: Room) -> Vector:
    return room.direction(rng) * room.threshold * 1e4


def _one_element(rng: np.random.Generator, room: Room) -> Vector:
    return _with_one(rng, np.zeros(room.step.size), 10 * room.threshold)


def _with_nan(rng: np.random.Generator, room: Room) -> Vector:
    return _with_one(rng, _ordinary(rng, room), math.nan)


def _with_infinity(rng: np.random.Generator, room: Room) -> Vector:
    return _with_one(rng, _ordinary(rng, room), rng.choice([-math.inf, math.inf]))


def _all_magnitudes(rng: np.random.Generator, room: Room) -> Vector:
    return room.signs(rng) * 2.0 ** rng.uniform(np.log2(room.step), np.log2(room.largest))


def _largest(rng: np.random.Generator, room: Room) -> Vector:
    return room.signs(rng) * room.largest * rng.uniform(0.5, 1, room.step.size)


def _squares_overflow(rng: np.random.Generator, room: Room) -> Vector:
    return room.signs(rng) * np.sqrt(room.largest) * rng.uniform(1, 4, room.step.size)


def _squares_underflow(rng: np.random.Generator, room: Room) -> Vector:
    """Return numbers with squares below half the smallest number of the dtype."""
    return room.signs(rng) * np.sqrt(room.step) * rng.uniform(0.25, 0.7, room.step.size)


def _subnormal(rng: np.random.Generator, room: Room) -> Vector:
    return room.signs(rng) * room.step * rng.integers(1, 100, room.step.size)


def _with_one(rng: np.random.Generator, values: Vector, element: float) -> Vector:
    if values.size:
        values[rng.integers(values.size)] = element
    return values


KINDS: dict[str, Callable[[np.random.Generator, Room], Vector]] = {
    "ordinary numbers": _ordinary,
    "norm at the threshold": _at_threshold,
    "far above the threshold": _far_above,
    "one large element": _one_element,
    "zeros": lambda rng, room: np.zeros(room.step.size),
    "one NaN": _with_nan,
    "nothing but NaN": lambda rng, room: np.full(room.step.size, math.nan),
    "one infinity": _with_infinity,
    "largest numbers": _largest,
    "squares overflow": _squares_overflow,
    "squares underflow": _squares_underflow,
    "subnormal numbers": _subnormal,
    "all magnitudes": _all_magnitudes,
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
