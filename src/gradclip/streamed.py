"""The norm of what is not in memory at once, as files or clients: parts are measured, added up, and clipped in turn."""

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradclip import policy, shards
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import find
from gradclip.backends.numpy import HOST
from gradclip.coefficient import check_threshold, coefficient, known_threshold, needs_split
from gradclip.norms import Norm, Order, measure
from gradclip.policy import check_policy
from gradclip.tree import flatten


@dataclass(frozen=True)
class PartialNorm:
    """What is known of a norm from some of the parts: a few numbers, however many arrays there are.

    Add up those of all parts, in any order, also with `sum`; then `norm` is that of everything, and `clip` clips each
    part by it. A partial norm can be pickled, and sent to another process.

    Attributes:
        ord: the order of the norm.
        numbers: a sum of powers for each range of magnitudes, and the errors of these, as `gradclip.shards` explains.
        parts: how many parts have been added up.
        floor: what elements that a device has read as zero can add to the norm at most.

    """

    ord: float
    numbers: tuple[float, ...]
    parts: int = 1
    floor: float = 0.0

    @ordinary_arithmetic
    def __add__(self, other: Any) -> "PartialNorm":
        if not isinstance(other, PartialNorm):
            return NotImplemented
        if other.ord != self.ord:
            raise ValueError(f"norms of the orders {self.ord} and {other.ord} cannot be added; measure all with one.")
        combined = max if Order(self.ord).extreme else operator.add
        numbers = tuple(map(combined, self.numbers, other.numbers))
        return PartialNorm(self.ord, numbers, self.parts + other.parts, self.floor + other.floor)

    def __radd__(self, other: Any) -> "PartialNorm":
        return self if other == 0 else NotImplemented

    @property
    @ordinary_arithmetic
    def norm(self) -> float:
        """The norm of all parts so far: NaN or inf where an element is, inf where it lies beyond float64."""
        with np.errstate(over="ignore"):
            return float(self._norm().product())

    @ordinary_arithmetic
    def clip(self, tree: Any, max_norm: float, *, nonfinite: str = "propagate") -> Any:
        """Scale one part by min(1, max_norm / norm): the norm of all parts, so clipped, is at most `max_norm`, exactly.

        Args:
            tree: a part, as it was measured.
            max_norm: the threshold of the whole, >= 0.
            nonfinite: "propagate", "raise" or "skip", as in `gradclip.clip_by_global_norm`, where any part holds NaN or
                an infinity. "zero" belongs to the measuring: put zeros there before.

        Returns:
            A new tree of the same structure and dtypes, bit-identical where the norm is at most `max_norm` by more
            than the error of its computation.

        Raises:
            TypeError, ValueError: as `gradclip.clip_by_global_norm`. FloatingPointError: under "raise".

        """
        if check_policy(nonfinite) == "zero":
            raise ValueError("nonfinite='zero' must be known when a norm is measured; put zeros there before.")
        flat, threshold = flatten(tree), check_threshold(max_norm)
        backend = find(flat.leaves, flat.paths, threshold)
        known = self._norm()
        if nonfinite == "raise" and not np.isfinite(known.value):
            raise FloatingPointError(f"the norm of all parts is {self.norm}: one of them holds NaN or an infinity.")
        with backend.precision():
            arrays = backend.enter([backend.prepare(leaf) for leaf in flat.leaves])
            if not arrays:
                return flat.rebuild([])
            value = backend.scalar(float(known.value), arrays)
            divisor = None if known.divisor is None else backend.scalar(float(known.divisor), arrays)
            norm = Norm(value, divisor, float(known.error), self.floor)
            limit = backend.scalar(known_threshold(backend, threshold), arrays)
            chosen = coefficient(backend, norm, limit, split=needs_split(backend, arrays))
            chosen = policy.apply(nonfinite, backend, backend.xp.isfinite(value), chosen)
            shrunk = backend.shrink(arrays, chosen)
            return flat.rebuild(backend.leave_all(shrunk, flat.leaves))

    def _norm(self) -> Norm:
        return shards.norm_of(HOST, [np.float64(x) for x in self.numbers], Order(self.ord), self.parts)


@ordinary_arithmetic
def partial_norm(tree: Any, ord: Any = 2) -> PartialNorm:
    """Return what `tree`, a part of a whole, knows of the norm of the whole.

    Args:
        tree: arrays of one framework in nested containers, as in `gradclip.global_norm`.
        ord: p, from 1 to 8, or `inf` or `-inf`; None means 2.

    Raises:
        TypeError: as `gradclip.global_norm`. ValueError: another `ord`, or a device without 64-bit numbers.

    >>> import numpy as np
    >>> shards = [{"w": np.array([3.0])}, {"b": np.array([4.0])}]
    >>> whole = sum(partial_norm(shard) for shard in shards)
    >>> whole.norm, whole.clip(shards[1], max_norm=1.0)["b"].round(6).tolist()
    (5.0, [0.8])

    """
    order = shards.check_order(Order.parse(ord))
    flat = flatten(tree)
    backend = find(flat.leaves, flat.paths)
    shards.check_wide(backend)
    with backend.precision():
        arrays = backend.enter([backend.prepare(leaf) for leaf in flat.leaves])
        norm = measure(backend, arrays, order)
        numbers = shards.vector(backend.xp, norm, order, empty=not arrays.elements())
        return PartialNorm(order.p, tuple(map(float, numbers)), floor=norm.floor)
