"""Clip each example of a batch by its own norm and add up, reading the data once if the backend can, else twice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradclip.backends.sums import ENOUGH
from gradclip.core.arrays import Arrays
from gradclip.core.coefficient import exceeds
from gradclip.core.decision import Clipping
from gradclip.core.formats import FLOAT64
from gradclip.core.nonfinite import SKIP
from gradclip.core.norms import Norm, relative_error, settled
from gradclip.core.pipeline import decide
from gradclip.core.protocols import Backend
from gradclip.core.rules import known_rule_for_sums, rule_for_sums
from gradclip.core.scopes import EXAMPLE, EXAMPLE_ALONE
from gradclip.core.values import Array

if TYPE_CHECKING:
    from gradclip.core.holders import Holders


@dataclass(frozen=True)
class Summed:
    """The result for a batch: wide sums over its examples, their norms, and which examples count as clipped."""

    sums: Sequence[Any]
    norm: Norm
    clipped: Any


@dataclass(frozen=True)
class Batch:
    """The gradients of a batch, and how to clip each example. `names` and `holders` are as in `decide`."""

    backend: Backend
    arrays: Arrays
    clipping: Clipping
    names: Callable[[], Sequence[str]]
    holders: "Holders"

    def clip_and_sum(self, mask: Array | None) -> Summed:
        """Clip each example by its own norm and add up the examples in the mask, or all if it is None."""
        batch = self._zeroed() if self.clipping.nonfinite.zeroes else self
        summed = batch._in_one_reading(mask)
        return batch._in_two_readings(mask) if summed is None else summed

    def _zeroed(self) -> "Batch":
        """Put zeros for the non-finite elements of a batch, if its values cannot be read for free."""
        backend, clipping = self.backend, self.clipping
        if backend.concrete or clipping.target.integers:
            return self
        return replace(self, arrays=backend.zeroed(self.arrays), clipping=replace(clipping, nonfinite=SKIP))

    def _in_two_readings(self, mask: Array | None) -> Summed:
        backend, arrays, clipping = self.backend, self.arrays, self.clipping
        integers = clipping.target.integers
        scope = EXAMPLE_ALONE if integers else EXAMPLE
        made = decide(backend, arrays, clipping, self.names, layout=scope, mask=mask, holders=self.holders)
        if integers:
            sums: Sequence[Any] = [backend.rounded_sum(x, made.coefficient) for x in made.arrays]
        else:
            sums = backend.weighted_sums(made.arrays, made.coefficient)
        threshold = backend.scalar(clipping.max_norm, self.arrays)
        clipped = exceeds(settled(backend, made.norm), threshold) & ~made.coefficient.keep
        return Summed(sums, made.norm, clipped)

    def _in_one_reading(self, mask: Array | None) -> Summed | None:
        """Clip and add up in one reading, or return None if the backend cannot.

        Examples with sums of squares that cannot be trusted are read again, separately. So what an example adds does
        not depend on the others.
        """
        backend, arrays, clipping = self.backend, self.arrays, self.clipping
        count = arrays.sharing(EXAMPLE)
        spoil = not (backend.concrete or clipping.nonfinite.blanks)
        if clipping.target.integers or not count or not (backend.concrete or self._always_trusted):
            return None
        error = relative_error(clipping.order, backend.examples_error(count), FLOAT64, exact=False)
        if isinstance(clipping.max_norm, float):
            rule = known_rule_for_sums(clipping.target, float(clipping.max_norm), error)
        else:
            rule = rule_for_sums(backend.xp, clipping.target, clipping.max_norm, error)
        found = backend.add_examples(arrays, rule, mask, spoil=spoil)
        if found is None:
            return None
        sums, norms = found
        norm = Norm(norms, None, error, 0.0)
        summed = Summed(sums, norm, exceeds(norm, clipping.max_norm))
        if self._always_trusted:
            return summed
        trusted = backend.xp.isfinite(norms) & (norms > math.sqrt(ENOUGH) if FLOAT64 in arrays.formats else True)
        others = ~trusted if mask is None else ~trusted & mask
        if not backend.xp.any(others):
            return summed
        # Examples out of range added nothing. Those too small to be trusted did, so add up the trusted ones alone.
        counted = backend.add_examples(arrays, rule, trusted if mask is None else trusted & mask, spoil=False)
        assert counted is not None
        return self._joined(counted[0], summed, others)

    def _joined(self, sums: Sequence[Any], summed: Summed, others: Array) -> Summed:
        """Add the sums of the other examples, which are read separately, to the sums of the trusted ones."""
        xp, apart = self.backend.xp, self._in_two_readings(others)
        norm = replace(summed.norm, value=xp.where(others, apart.norm.product(), summed.norm.value))
        clipped = xp.where(others, apart.clipped, summed.clipped)
        return Summed([a + b for a, b in zip(sums, apart.sums, strict=True)], norm, clipped)

    @property
    def _always_trusted(self) -> bool:
        """Say whether one reading is always enough, so no value needs to be checked."""
        policy = self.clipping.nonfinite
        if self.backend.concrete:
            return policy.blanks and FLOAT64 not in self.arrays.formats
        return not (policy.raises or policy.zeroes) and self.backend.weighs_all(self.arrays)
