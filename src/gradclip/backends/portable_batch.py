"""Sums over the examples of a batch, written once against the array API standard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradclip.backends.sums import over_examples
from gradclip.core.arrays import Arrays
from gradclip.core.formats import FLOAT64
from gradclip.core.values import Array

if TYPE_CHECKING:
    from gradclip.core.records import Coefficient, Factors, Rule


class PortableBatch(ABC):
    """The operations on batches that `Portable` inherits."""

    xp: ModuleType

    @abstractmethod
    def parts(self, x: Array) -> list[Array]: ...

    @abstractmethod
    def join(self, parts: list[Array], like: Array) -> Array: ...

    @abstractmethod
    def widen(self, x: Array) -> Array: ...

    @abstractmethod
    def without_nonfinite(self, arrays: Arrays) -> Arrays: ...

    @abstractmethod
    def _sum(self, wide: Array, axes: tuple[int, ...]) -> Array: ...

    def examples_error(self, count: int) -> float:
        return count * FLOAT64.roundoff

    def weighs_all(self, arrays: Arrays) -> bool:
        return FLOAT64 not in arrays.formats

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: Array | None, *, spoil: bool
    ) -> tuple[list[Any], Array] | None:
        return None

    def rounded_sum(self, x: Any, coefficient: Coefficient) -> Array:
        blank = over_examples(coefficient.blank, x)
        product = self.xp.where(blank, 0.0, self._weighed(x, coefficient.wide))
        return self.xp.sum(self.xp.astype(self.xp.round(product), self.xp.int64), axis=0)  # exact in any order

    def multiplied(self, x: Array, first: Array, second: Array | None) -> Array:
        """Return an array times two factors, one after the other: the product of the two may leave the range."""
        product = x * first
        return product if second is None else product * second

    def _weighed(self, x: Array, factors: Factors) -> Array:
        """Return a real array in the wide format, each example times its factors."""
        first = over_examples(factors.first, x)
        return self.multiplied(
            self.widen(x), first, None if factors.second is None else over_examples(factors.second, x)
        )

    def zeroed(self, arrays: Arrays) -> Arrays:
        return self.without_nonfinite(arrays)

    def weighted_sums(self, arrays: Arrays, coefficient: Coefficient) -> list[Array]:
        return [self.weighted_sum(x, coefficient) for x in arrays]

    def weighted_sum(self, x: Any, coefficient: Coefficient) -> Array:
        """Return the weighted sum of one array over its examples."""
        weights = coefficient.weights(self.xp)
        sums = []
        for part in self.parts(x):
            blank = over_examples(coefficient.blank, part)
            product = self.xp.where(blank, 0.0, self._weighed(part, weights))
            sums.append(self._sum(product, (0,)))
        return self.join(sums, x)
