"""An attack on sums over batches: a loss with a kink exactly at its predictions.

The gradient of loss(w, x, y) = |x @ w - y| is x or -x, or zero at the kink. The last bit of x @ w decides which. That
bit can depend on the number of examples in the batch. One example then moves the gradient of each of the others by up
to twice the threshold. If all rows are multiples of one vector, all move in the same direction.
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
_SIZES = (2, 4, 8)  # sizes at which libraries switch to a different kind of program
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
    """Return the norm to which an example is clipped, over all its thresholds."""
    return root_up(sum((Fraction(float(c)) ** 2 for c in flatten(clipped.max_norm).leaves), Fraction(0)))


def step_of(clipped: ClippedFunction) -> Fraction:
    """Return the unit of the result, in units of the gradients: one, or a step of the grid."""
    grid = clipped.settings.grid
    return Fraction(1) if grid is None else Fraction(threshold_of(clipped)) / grid


def sizes(clipped: ClippedFunction, count: int) -> list[int]:
    """Return the batch sizes to try with `count` examples."""
    most = min(count, clipped.pad_to or count)
    return sorted({min(size, most) for size in (*_SIZES, most)})


def of_gradients(clipped: ClippedFunction, zeros_like_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the clipped sum as a function of given gradients, through a loss that is linear in its parameters."""

    def loss(params: Any, grads: Any) -> Any:
        pairs = zip(flatten(params).leaves, flatten(grads).leaves, strict=True)
        return sum(_namespace(p).sum(p * g) for p, g in pairs)

    made = replace(clipped, fun=loss, batch_argnums=(1,), has_aux=False, **_BARE)

    def function(grads: Any) -> Any:
        flat = flatten(grads)
        return made(flat.rebuild(list(map(zeros_like_one, flat.leaves))), grads)

    return function


def kinked(clipped: ClippedFunction) -> ClippedFunction:
    """Return a copy that clips and sums the gradients of the loss with the kink."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        predicted = _namespace(x).matmul(x, w)
        return abs(predicted - y), predicted

    settings = replace(clipped.settings, max_norm=threshold_of(clipped))
    return replace(clipped, fun=loss, settings=settings, batch_argnums=(1, 2), has_aux=True, **_BARE)


def _namespace(array: object) -> ModuleType:
    return framework_of(array).namespace  # type: ignore[union-attr]


@dataclass(frozen=True)
class Kinks:
    """The attack on `call(w, x, y)`, which returns the sums for the kinked loss, and its predictions.

    `threshold`: that of one example. `shortens`: the neighbour of a batch lacks one example, instead of having zeros.
    """

    call: Callable[..., tuple[list[np.ndarray], np.ndarray]]
    dtype: Any
    threshold: float
    shortens: bool

    def tried(self, size: int, rng: np.random.Generator) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Yield the sums over batches of `size` examples, and over their neighbours."""
        for index in (size - 1, 0):
            draw = _Draw(self, size, index, rng)
            yield draw.sums()


class _Draw:
    """Rows that are multiples of one vector. The neighbour lacks one of them."""

    def __init__(self, kinks: Kinks, size: int, index: int, rng: np.random.Generator) -> None:
        self.kinks, self.size, self.index, self.rng = kinks, size, index, rng
        direction, w = rng.normal(size=(2, _FEATURES))
        # Rows a little above the threshold, if its numbers are in range.
        direction *= np.clip(2.0 * kinks.threshold, 1e-20, 1e20) / np.linalg.norm(direction)
        self.direction, self.w = direction.astype(kinks.dtype), w.astype(kinks.dtype)
        self.lengths = self._lengths()

    def sums(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        for _ in range(_DRAWS):
            here, there = self._predicted()
            # A prediction depends on the row and its place. Redraw the rows that move in the wrong direction.
            self.lengths = np.where(here < there, self.lengths, self._lengths())
        here, there = self._predicted()
        beyond = 2 * np.abs(here).max()
        labels = np.where(here < there, here / 2 + there / 2, beyond).astype(self.kinks.dtype)
        # Removing the row moves the sum in the same direction as the other rows do.
        labels[self.index] = beyond
        with_it, _ = self.kinks.call(self.w, self._rows(), labels)
        without, _ = self.kinks.call(self.w, self._neighbour(self._rows()), self._neighbour(labels))
        return with_it, without

    def _lengths(self) -> np.ndarray:
        return self.rng.uniform(1, 2, self.size).astype(self.kinks.dtype)

    def _rows(self) -> np.ndarray:
        return self.lengths[:, None] * self.direction

    def _predicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the predictions for each example in the batch, and in its neighbour."""
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
