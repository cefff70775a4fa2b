"""The norm of one gradient that is not in memory at once: its parts are measured, added up, and clipped in turn.

The parts may be files, or what several processes or clients hold of it. They have one norm and are clipped together. To
bound what each of several clients sends, clip each by its own norm, with `gradclip.clip_by_global_norm`.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradclip.arguments import check_threshold
from gradclip.arithmetic import ordinary_arithmetic
from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.host.backend import HOST
from gradclip.backends.registry import find, is_traced, without_values
from gradclip.core import accumulators
from gradclip.core.decide import Clipping, decide
from gradclip.core.holders import Holders
from gradclip.core.nonfinite import PROPAGATE, Nonfinite
from gradclip.core.norms import Norm, Order, measure
from gradclip.core.rules import CLIP
from gradclip.core.scopes import TREE
from gradclip.tree import flatten
from gradclip.typing import Ord, Policy, Threshold, Tree

_MOST_PARTS = 2**40
"""How many parts' numbers stay within float64, as `gradclip.core.accumulators` shows."""


@dataclass(frozen=True)
class PartialNorm:
    """What some parts of one gradient tell about its norm: a few numbers, however many arrays there are.

    Add up those of all parts, in any order, also with `sum`; then `norm` is that of everything, and `clip` clips each
    part by it. Between processes send `to_json()`, which `from_json` reads and checks. A partial norm can be pickled,
    too; but unpickling what somebody else has sent runs whatever code they put there.

    Attributes:
        ord: the order of the norm.
        numbers: a sum of powers for each range of magnitudes, and the errors of these: `gradclip.core.accumulators`.
        parts: how many parts have been added up.
        floor: what elements that a device has read as zero can add to the norm at most.

    Raises:
        TypeError, ValueError: numbers that `partial_norm` cannot have returned, nor a sum of such. That they tell of
        the gradients somebody holds cannot be checked here.

    """

    ord: float
    numbers: tuple[float, ...]
    parts: int = 1
    floor: float = 0.0

    def __post_init__(self) -> None:
        order = _checked_order(self.ord)
        if not isinstance(self.numbers, list | tuple):
            raise TypeError(f"numbers must be a tuple of numbers, got {self.numbers!r:.80}.")
        checked = tuple(_number("numbers", x) for x in self.numbers)
        accumulators.check(checked, order)
        if isinstance(self.parts, bool) or not isinstance(self.parts, numbers.Integral):
            raise TypeError(f"parts must be an integer, got {self.parts!r:.80}.")
        if not 1 <= self.parts <= _MOST_PARTS:
            raise ValueError(f"parts must be from 1 to {_MOST_PARTS}, got {self.parts!r:.80}.")
        floor = _number("floor", self.floor)
        if not 0 <= floor < math.inf:
            raise ValueError(f"floor must be finite and not negative, got {floor}.")
        values = {"ord": order.p, "numbers": checked, "parts": int(self.parts), "floor": floor}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        # So that what is unpickled is checked, too.
        return PartialNorm, (self.ord, self.numbers, self.parts, self.floor)

    def to_json(self) -> str:
        """Return the partial norm as JSON, from which `from_json` makes the same, to the last bit.

        An object with the attributes; numbers that are not finite, which JSON lacks, are the strings "nan", "inf" and
        "-inf".

        >>> import numpy as np
        >>> part = partial_norm(np.array([3.0, 4.0]), ord=1)
        >>> PartialNorm.from_json(part.to_json()) == part
        True

        """
        plain = {name: list(map(_plain, x)) if name == "numbers" else _plain(x) for name, x in asdict(self).items()}
        return json.dumps(plain, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> PartialNorm:
        """Return the partial norm that `to_json` has written. Raises ValueError for anything else."""
        try:
            read = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(read, dict) or read.keys() != {"ord", "numbers", "parts", "floor"}:
                raise ValueError("it must be an object with ord, numbers, parts and floor.")
            if not isinstance(read["numbers"], list):
                raise ValueError("numbers must be a list.")
            found = tuple(map(_from_plain, read["numbers"]))
            return cls(_from_plain(read["ord"]), found, read["parts"], _from_plain(read["floor"]))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is no partial norm as to_json writes it, got {text!r:.80}: {error}") from error

    @ordinary_arithmetic
    def __add__(self, other: object) -> PartialNorm:
        if not isinstance(other, PartialNorm):
            return NotImplemented
        if other.ord != self.ord:
            raise ValueError(f"norms of the orders {self.ord} and {other.ord} cannot be added; measure all with one.")
        combined = max if Order(self.ord).extreme else operator.add
        numbers = tuple(map(combined, self.numbers, other.numbers))
        return PartialNorm(self.ord, numbers, self.parts + other.parts, self.floor + other.floor)

    def __radd__(self, other: object) -> PartialNorm:
        return self if other == 0 else NotImplemented

    @property
    @ordinary_arithmetic
    def norm(self) -> float:
        """The norm of all parts so far: NaN or inf where an element is, inf where it lies beyond float64."""
        with HOST.precision():
            return float(self._norm().product())

    @ordinary_arithmetic
    def clip(self, tree: Tree, max_norm: Threshold, *, nonfinite: Policy = "propagate") -> Tree:
        """Scale one part by min(1, max_norm / norm): the norm of all parts, so clipped, is at most `max_norm`, exactly.

        That holds where `self` is the sum over all parts, each as it was measured.

        Args:
            tree: a part, as it was measured.
            max_norm: the threshold of the whole, >= 0.
            nonfinite: "propagate", "raise" or "skip", as in `gradclip.clip_by_global_norm`, where any part holds NaN or
                an infinity. "zero" belongs to the measuring: put zeros there before.

        Returns:
            A new tree of the same structure and dtypes, bit-identical where the norm is at most `max_norm` by more
            than the error of its computation.

        Raises:
            TypeError, ValueError: as `gradclip.clip_by_global_norm`; ValueError also for a part whose own norm exceeds
            that of all parts, which cannot have been counted as it is. FloatingPointError: under "raise".

        """
        policy = Nonfinite.named(nonfinite)
        if policy.zeroes:
            raise ValueError("nonfinite='zero' must be known when a norm is measured; put zeros there before.")
        flat = flatten(tree)
        backend = find(flat.leaves, flat.paths, max_norm)
        threshold = check_threshold(max_norm, backend=backend)
        holders = PartsInTurn(self, self._norm())
        if policy.raises:
            # What there is to raise is known before any part is looked at, also in traced code.
            holders.check_finite()
            policy = PROPAGATE
        with backend.precision():
            arrays = backend.enter([backend.prepare(leaf) for leaf in flat.leaves])
            if not arrays:
                return flat.rebuild([])
            clipping = Clipping(threshold, Order(self.ord), policy, CLIP)
            made = decide(backend, arrays, clipping, flat.paths, holders=holders)
            return flat.rebuild(backend.leave_all(backend.shrink(made.arrays, made.coefficient, TREE), flat.leaves))

    def _norm(self) -> Norm:
        with HOST.precision():
            return accumulators.norm_of(HOST, [np.float64(x) for x in self.numbers], Order(self.ord), self.parts)


@dataclass(frozen=True)
class PartsInTurn(Holders):
    """Parts of one gradient, of which one is here at a time: the norm of the whole has been added up before."""

    whole: PartialNorm
    known: Norm

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm that is known. Raises ValueError for a part that cannot have been counted."""
        if backend.visible:
            self._check_counted(backend, arrays, order)
        value = backend.scalar(float(self.known.value), arrays)
        divisor = None if self.known.divisor is None else backend.scalar(float(self.known.divisor), arrays)
        return Norm(value, divisor, float(self.known.error), self.whole.floor)

    def check_finite(self) -> None:
        """Raise a FloatingPointError where the norm is not finite; which part it is due to is not known."""
        if not np.isfinite(self.known.value):
            raise FloatingPointError(
                f"the norm of all parts is {self.whole.norm}: one of them holds NaN or an infinity."
            )

    def _check_counted(self, backend: Backend, arrays: Arrays, order: Order) -> None:
        """Raise a ValueError where the norm of a part cannot be one of those that were added up."""
        whole = self.known
        if not np.isfinite(whole.value) or not arrays.elements():
            return
        own = _measured(backend, arrays, order)._norm()
        ratio = 1.0 if own.divisor is None else float(own.divisor) / float(whole.divisor)
        least, most = (float(own.value) * ratio * (1.0 + sign * 2.0 * float(own.error)) for sign in (-1, 1))
        value, spread = float(whole.value), 2.0 * float(whole.error)
        floor = self.whole.floor if whole.divisor is None else self.whole.floor / float(whole.divisor)
        # Of the smallest magnitude the whole has the least, not the most.
        fits = least <= value * (1.0 + spread) + floor if order.p > 0 else most + floor >= value * (1.0 - spread)
        if not (fits and np.isfinite(own.value)):
            raise ValueError(
                f"this part has the norm {float(own.product()):g}, all parts together have {float(whole.product()):g}: "
                "it has not been counted, or not as it is now. Add up partial_norm of every part first."
            )


@ordinary_arithmetic
def partial_norm(tree: object, ord: Ord = 2) -> PartialNorm:
    """Return what `tree`, a part of ONE gradient, knows of the norm of the whole.

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
    order = accumulators.check_order(Order.parse(ord))
    flat = flatten(tree)
    backend = find(flat.leaves, flat.paths)
    accumulators.check_wide(backend)
    if any(map(is_traced, flat.leaves)):
        raise ValueError(
            "a partial norm holds numbers, which a traced call does not have. Call it outside of jit, vmap and "
            "tf.function."
        )
    with backend.precision():
        arrays = backend.enter([backend.prepare(leaf) for leaf in flat.leaves])
        return _measured(backend, arrays, order)


def _measured(backend: Backend, arrays: Arrays, order: Order) -> PartialNorm:
    empty = next(filter(None, map(without_values, arrays.items)), None)
    if empty is not None:
        raise ValueError(f"{empty} holds no values to be measured. Pass the tensors that hold them.")
    # Other parts may be float64, which nobody knows yet.
    norm = measure(backend, arrays.as_precise_as(["float64"]), order)
    known = accumulators.filled(backend.xp, norm, order, empty=not arrays.elements())
    return PartialNorm(order.p, tuple(map(float, known)), floor=norm.floor)


def _checked_order(ord: object) -> Order:
    if ord is None or isinstance(ord, str | Order):
        raise TypeError(f"ord must be a number from 1 to 8, inf or -inf, got {ord!r:.80}.")
    return accumulators.check_order(Order.parse(ord))


def _number(name: str, value: object) -> float:
    """Return a number as a float. Raises TypeError for what is none, ValueError for one that is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must hold numbers, got {value!r:.80} of type {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must hold numbers that a float64 can hold, got one beyond.") from None


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _from_plain(value: object) -> Any:
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON; write it as a string.")
