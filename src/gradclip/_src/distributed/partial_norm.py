"""The norm of a gradient too big for memory: measure each part, add the results, then clip part by part.

The parts can be files, or what different processes or clients hold. They share one norm and are clipped together. To
limit each client's contribution separately, clip each one with `gradclip.clip_by_global_norm` instead.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradclip._src.annotations import Integers, Ord, Policy, Threshold, Tree, Where
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.registry import find, is_traced, without_values
from gradclip._src.core import accumulators
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.decision import Clipping
from gradclip._src.core.holders import Holders
from gradclip._src.core.nonfinite import PROPAGATE, Nonfinite
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.pipeline import decide
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import CLIP
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.json_text import from_json, to_json
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import choice_of, counted_part, prepared
from gradclip._src.public import public
from gradclip._src.words import shown, typed


def number(name: str, value: object) -> float:
    """Return a number as a float. Raises TypeError if it is not a number, ValueError if it is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must hold numbers, got {typed(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must hold numbers in the range of float64, got a larger one.") from None


_MOST_PARTS = 2**40
"""The most parts whose accumulators fit in float64. `core/accumulators.py` has the proof."""


@public
@dataclass(frozen=True)
class PartialNorm:
    """What some parts of one gradient contribute to its norm: a few numbers, however many arrays there are.

    Add the partial norms of all parts, in any order, with `+` or `sum`. The result's `norm` is the norm of the whole
    gradient, and its `clip` clips each part by it. To send a partial norm to another process, use `to_json()`;
    `from_json` reads and checks it. Pickling works too, but unpickling data from someone else runs whatever code they
    put in it.

    Attributes:
        ord: the order of the norm.
        numbers: a sum of powers for each range of magnitudes, and their errors.
        parts: how many parts have been added.
        floor: an upper bound on what elements that a device flushed to zero could add to the norm.

    Raises:
        TypeError, ValueError: if the numbers cannot come from `partial_norm` or a sum of its results. Whether they
            describe real gradients cannot be checked.

    """

    ord: float
    numbers: tuple[float, ...]
    parts: int = 1
    floor: float = 0.0

    def __post_init__(self) -> None:
        order = _checked_order(self.ord)
        if not isinstance(self.numbers, list | tuple):
            raise TypeError(f"numbers must be a tuple of numbers, got {shown(self.numbers)}.")
        checked = tuple(number("numbers", x) for x in self.numbers)
        accumulators.check(checked, order)
        if isinstance(self.parts, bool) or not isinstance(self.parts, numbers.Integral):
            raise TypeError(f"parts must be an integer, got {shown(self.parts)}.")
        if not 1 <= self.parts <= _MOST_PARTS:
            raise ValueError(f"parts must be from 1 to {_MOST_PARTS}, got {shown(self.parts)}.")
        floor = number("floor", self.floor)
        if not 0 <= floor < math.inf:
            raise ValueError(f"floor must be finite and non-negative, got {floor}.")
        values = {"ord": order.p, "numbers": checked, "parts": int(self.parts), "floor": floor}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        # Unpickling goes through the constructor, which checks the values.
        return PartialNorm, (self.ord, self.numbers, self.parts, self.floor)

    @with_subnormals
    def to_json(self) -> str:
        """Return the partial norm as JSON. `from_json` restores it exactly, to the last bit.

        The JSON object has one field per attribute. JSON has no non-finite numbers, so these are the strings "nan",
        "inf" and "-inf".

        >>> import numpy as np
        >>> part = partial_norm(np.array([3.0, 4.0]), ord=1)
        >>> PartialNorm.from_json(part.to_json()) == part
        True

        """
        return to_json(asdict(self))

    @classmethod
    @with_subnormals
    def from_json(cls, text: str | bytes) -> PartialNorm:
        """Return the partial norm that `to_json` wrote. Raises ValueError for any other text."""
        try:
            read = from_json(text)
            if not isinstance(read, dict) or read.keys() != {"ord", "numbers", "parts", "floor"}:
                raise ValueError("it must be a JSON object with exactly ord, numbers, parts and floor.")
            return cls(**read)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the text is not a partial norm written by to_json, got {shown(text)}: {error}"
            ) from error

    @with_subnormals
    def __add__(self, other: object) -> PartialNorm:
        if not isinstance(other, PartialNorm):
            return NotImplemented
        if other.ord != self.ord:
            raise ValueError(
                f"partial norms of the orders {self.ord} and {other.ord} cannot be added. Measure all parts with the "
                "same ord."
            )
        combined = max if Order(self.ord).extreme else operator.add
        numbers = tuple(map(combined, self.numbers, other.numbers))
        return PartialNorm(self.ord, numbers, self.parts + other.parts, self.floor + other.floor)

    def __radd__(self, other: object) -> PartialNorm:
        return self if other == 0 else NotImplemented

    @property
    @with_subnormals
    def norm(self) -> float:
        """The norm of all parts so far. NaN or inf if an element is; also inf if it exceeds the range of float64."""
        with HOST.precision():
            return float(self._norm().product())

    @with_subnormals
    def clip(
        self,
        tree: Tree,
        max_norm: Threshold,
        *,
        nonfinite: Policy = "propagate",
        where: Where = None,
        integers: Integers = "keep",
    ) -> Tree:
        """Scale one part by min(1, max_norm / norm), where norm is the norm of all parts.

        After every part is clipped this way, the norm of the whole never exceeds `max_norm`, even by rounding. For
        this, `self` must be the sum over all parts, and every part must be unchanged since it was measured.

        Args:
            tree: one part, unchanged since it was measured.
            max_norm: the threshold for the whole gradient, >= 0.
            nonfinite: "propagate", "raise" or "drop": what to do if any part holds NaN or infinity, as in
                `gradclip.clip_by_global_norm`. "zero" is not possible here: replace non-finite elements with zeros
                before you call `partial_norm`.
            where: which leaves count, the same that were measured. All others come back as they are.
            integers: "raise" refuses integers, as in `gradclip.global_norm`.

        Returns:
            A new tree with the same structure and dtypes. It is bit-identical to the input if the norm is below
            `max_norm` by more than its rounding error.

        Raises:
            TypeError, ValueError: as `gradclip.clip_by_global_norm`. ValueError also if this part's norm exceeds the
                norm of all parts, which means that the part was not added, or has changed since. FloatingPointError:
                with "raise".

        """
        policy = Nonfinite.named(nonfinite)
        if policy.zeroes:
            raise ValueError(
                "nonfinite='zero' does not work here, because the norm has already been measured. Replace NaN and "
                "infinities with zeros before you call partial_norm."
            )
        flat = counted_part(tree, choice_of(where, integers))
        backend = find(flat.leaves, flat.paths, max_norm)
        threshold = check_threshold(max_norm, backend=backend)
        holders = PartsInTurn(self, self._norm())
        if policy.raises:
            # The norm of all parts is already known, so this works before any part is read, even in traced code.
            holders.check_finite()
            policy = PROPAGATE
        with backend.precision():
            arrays = backend.enter(prepared(backend, flat))
            if not arrays:
                return flat.rebuild([])
            clipping = Clipping(threshold, Order(self.ord), policy, CLIP)
            made = decide(backend, arrays, clipping, flat.paths, holders=holders)
            return flat.rebuild(backend.leave_all(made.scaled(backend), flat.leaves))

    def _norm(self) -> Norm:
        with HOST.precision():
            return accumulators.norm_of(HOST, [np.float64(x) for x in self.numbers], Order(self.ord), self.parts)


@dataclass(frozen=True)
class PartsInTurn(Holders):
    """Parts of one gradient, one at a time. The norm of the whole has already been added up."""

    whole: PartialNorm
    known: Norm

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the known norm. Raises ValueError for a part that cannot be one of those that were added."""
        if backend.visible:
            self._check_counted(backend, arrays, order)
        value = backend.scalar(float(self.known.value), arrays)
        divisor = None if self.known.divisor is None else backend.scalar(float(self.known.divisor), arrays)
        return Norm(value, divisor, float(self.known.error), self.whole.floor)

    def check_finite(self) -> None:
        """Raise a FloatingPointError if the norm is not finite. Which part caused it is unknown."""
        if not np.isfinite(self.known.value):
            raise FloatingPointError(
                f"the norm of all parts is {self.whole.norm}: one of the parts holds NaN or infinity. To go on, leave "
                "out this gradient, or pass nonfinite='drop'."
            )

    def _check_counted(self, backend: Backend, arrays: Arrays, order: Order) -> None:
        """Raise a ValueError if this part's norm shows that it was not among the parts added up."""
        whole = self.known
        if not np.isfinite(whole.value) or not arrays.elements():
            return
        own = _measured(backend, arrays, order)._norm()
        ratio = 1.0 if own.divisor is None else float(own.divisor) / float(whole.divisor)
        least, most = (float(own.value) * ratio * (1.0 + sign * 2.0 * float(own.error)) for sign in (-1, 1))
        value, spread = float(whole.value), 2.0 * float(whole.error)
        floor = self.whole.floor if whole.divisor is None else self.whole.floor / float(whole.divisor)
        # For ord=-inf the norm is the smallest magnitude, so the whole's norm is at most the part's.
        fits = least <= value * (1.0 + spread) + floor if order.p > 0 else most + floor >= value * (1.0 - spread)
        if not (fits and np.isfinite(own.value)):
            raise ValueError(
                f"this part has the norm {float(own.product()):g}, but all parts together have the norm "
                f"{float(whole.product()):g}: the part was not added, or has changed since. Measure every part with "
                "partial_norm and add the results before you clip."
            )


@public
@with_subnormals
def partial_norm(tree: object, ord: Ord = 2, *, where: Where = None, integers: Integers = "keep") -> PartialNorm:
    """Measure one part of a gradient. Add the results of all parts to get the norm of the whole.

    Args:
        tree: nested containers of arrays of one framework, as in `gradclip.global_norm`. Integers alone warn.
        ord: p from 1 to 8, `inf` or `-inf`. None means 2.
        where: which leaves count, as in `gradclip.global_norm`. A part without any warns.
        integers: "raise" refuses integers, as there.

    Returns:
        A `PartialNorm`, which has the norm of its parts as a Python float, and clips each part.

    Raises:
        TypeError: as `gradclip.global_norm`. ValueError: for any other `ord`, or on a device without 64-bit numbers.

    >>> import numpy as np
    >>> shards = [{"w": np.array([3.0])}, {"b": np.array([4.0])}]
    >>> whole = sum(partial_norm(shard) for shard in shards)
    >>> whole.norm, whole.clip(shards[1], max_norm=1.0)["b"].round(6).tolist()
    (5.0, [0.8])

    """
    order = accumulators.check_order(Order.parse(ord))
    flat = counted_part(tree, choice_of(where, integers))
    backend = find(flat.leaves, flat.paths)
    accumulators.check_wide(backend)
    if any(map(is_traced, flat.leaves)):
        raise ValueError(
            "partial_norm needs concrete values, but got traced arrays. Call it outside jit, vmap and tf.function."
        )
    with backend.precision():
        arrays = backend.enter(prepared(backend, flat))
        return _measured(backend, arrays, order)


def _measured(backend: Backend, arrays: Arrays, order: Order) -> PartialNorm:
    empty = next(filter(None, map(without_values, arrays.items)), None)
    if empty is not None:
        raise ValueError(f"{empty} holds no values to measure. Pass the tensors that hold the values.")
    # Other parts may be float64, which this one cannot know, so half types get that precision as well.
    norm = backend.norms(arrays.as_precise_as(["float64"]), order)
    known = accumulators.filled(backend.xp, norm, order, empty=not arrays.elements())
    return PartialNorm(order.p, tuple(map(float, known)), floor=norm.floor)


def _checked_order(ord: object) -> Order:
    if ord is None or isinstance(ord, str | Order):
        raise TypeError(f"ord must be a number from 1 to 8, inf or -inf, got {shown(ord)}.")
    return accumulators.check_order(Order.parse(ord))
