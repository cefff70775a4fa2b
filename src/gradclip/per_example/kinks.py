"""An attack on sums over batches: a loss with a kink just where its predictions are.

Of loss(w, x, y) = |x @ w - y| the gradient is x or -x, or zero at the kink, which the last bit of x @ w decides. Where
these bits are not the example's own, as another number of examples can make them, one example moves the gradients of
the others by up to twice the threshold each, and of rows that are multiples of one vector all in the same direction.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np

from gradclip.backends.registry import framework_of
from gradclip.per_example.function import ClippedFunction
from gradclip.per_example.rounding import root_up
from gradclip.tree import flatten

_FEATURES = 257
_SIZES = (2, 4, 8)  # where libraries go over from one kind of program to another
_DRAWS = 12
_BARE: dict[str, Any] = {
    "argnums": 0,
    "keep_batch_dim": False,
    "return_values": False,
    "return_norms": False,
    "prng_argnum": None,
    "assumed": False,
}


def threshold_of(clipped: ClippedFunction) -> float:
    """Return what the norm of an example is clipped to."""
    return root_up(sum((Fraction(float(c)) ** 2 for c in flatten(clipped.max_norm).leaves), Fraction(0)))


def step_of(clipped: ClippedFunction) -> Fraction:
    """Return in units of the gradients what one is in the result: a step of the grid where it is on one."""
    grid = clipped.settings.grid
    return Fraction(1) if grid is None else Fraction(threshold_of(clipped)) / grid


def sizes(clipped: ClippedFunction, count: int) -> list[int]:
    """Return how many examples to try of `count`."""
    most = min(count, clipped.pad_to or count)
    return sorted({min(size, most) for size in (*_SIZES, most)})


def of_gradients(clipped: ClippedFunction, zeros_like_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the clipped sum as a function of the gradients, those of a loss that is linear in its parameters."""

    def loss(params: Any, grads: Any) -> Any:
        pairs = zip(flatten(params).leaves, flatten(grads).leaves, strict=True)
        return sum(_namespace(p).sum(p * g) for p, g in pairs)

    made = replace(clipped, fun=loss, batch_argnums=(1,), has_aux=False, **_BARE)

    def function(grads: Any) -> Any:
        flat = flatten(grads)
        return made(flat.rebuild(list(map(zeros_like_one, flat.leaves))), grads)

    return function


def kinked(clipped: ClippedFunction) -> ClippedFunction:
    """Return the function that clips and sums as this one does, but gradients of the loss with the kink."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        predicted = _namespace(x).matmul(x, w)
        return abs(predicted - y), predicted

    settings = replace(clipped.settings, max_norm=threshold_of(clipped))
    return replace(clipped, fun=loss, settings=settings, batch_argnums=(1, 2), has_aux=True, **_BARE)


def _namespace(array: object) -> ModuleType:
    return framework_of(array).namespace  # type: ignore[union-attr]


@dataclass(frozen=True)
class Kinks:
    """The attack on `call(w, x, y)`, which returns the sums for the kinked loss, and what was predicted.

    `threshold`: of one example. `shortens`: whether the neighbour of a batch lacks an example, or has zeros for it.
    """

    call: Callable[..., tuple[list[np.ndarray], np.ndarray]]
    dtype: Any
    threshold: float
    shortens: bool

    def tried(self, size: int, rng: np.random.Generator) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Yield the sums over batches of so many examples, and over their neighbours."""
        for index in (size - 1, 0):
            draw = _Draw(self, size, index, rng)
            yield draw.sums()


class _Draw:
    """Rows that are multiples of one vector, of which one is to go."""

    def __init__(self, kinks: Kinks, size: int, index: int, rng: np.random.Generator) -> None:
        self.kinks, self.size, self.index, self.rng = kinks, size, index, rng
        direction, w = rng.normal(size=(2, _FEATURES))
        # Rows a little above the threshold, as far as the numbers reach.
        direction *= np.clip(2.0 * kinks.threshold, 1e-20, 1e20) / np.linalg.norm(direction)
        self.direction, self.w = direction.astype(kinks.dtype), w.astype(kinks.dtype)
        self.lengths = self._lengths()

    def sums(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        for _ in range(_DRAWS):
            here, there = self._predicted()
            # What a row is predicted is its own and its place's: those of the other direction are drawn again.
            self.lengths = np.where(here < there, self.lengths, self._lengths())
        here, there = self._predicted()
        beyond = 2 * np.abs(here).max()
        labels = np.where(here < there, here / 2 + there / 2, beyond).astype(self.kinks.dtype)
        # The one that goes takes with it what the others then have more.
        labels[self.index] = beyond
        with_it, _ = self.kinks.call(self.w, self._rows(), labels)
        without, _ = self.kinks.call(self.w, self._neighbour(self._rows()), self._neighbour(labels))
        return with_it, without

    def _lengths(self) -> np.ndarray:
        return self.rng.uniform(1, 2, self.size).astype(self.kinks.dtype)

    def _rows(self) -> np.ndarray:
        return self.lengths[:, None] * self.direction

    def _predicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what is predicted for each example of the batch, and of its neighbour."""
        rows, labels = self._rows(), np.zeros(self.size, self.kinks.dtype)
        _, here = self.kinks.call(self.w, rows, labels)
        _, there = self.kinks.call(self.w, self._neighbour(rows), self._neighbour(labels))
        return here, np.insert(there, self.index, 0.0) if self.kinks.shortens else there

    def _neighbour(self, rows: np.ndarray) -> np.ndarray:
        if self.kinks.shortens:
            return np.delete(rows, self.index, axis=0)
        other = rows.copy()
        other[self.index] = 0.0
        return other
