"""The source itself, run on symbols: each way through it becomes the operations that round on that way.

So no model of the code is written by hand. `ways` calls a function once for each combination of answers to the
comparisons that its result depends on. The result is a `Number`, which knows the operations that lead to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from gradclip._src.core.formats import FLOAT32, FLOAT64, Format


@dataclass(frozen=True)
class Dtype:
    """The dtype of a number, by name."""

    name: str


class _Operators:
    """What can be done with a number, and with one that is computed later."""

    shape, ndim = (), 0

    def __add__(self, other: Any) -> Any:
        return _computed("+", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _computed("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _computed("-", other, self)

    def __neg__(self) -> Any:
        return _computed("-", 0.0, self)

    def __mul__(self, other: Any) -> Any:
        return _computed("*", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return _computed("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _computed("/", other, self)

    # Answers include that the two are equal, so that proofs hold for `<` and for `<=`.
    def __lt__(self, other: Any) -> Condition:
        return Condition(lambda: _WAYS[-1].answer(now(self), now(other)))

    __le__ = __lt__

    def __gt__(self, other: Any) -> Condition:
        return Condition(lambda: _WAYS[-1].answer(now(other), now(self)))

    __ge__ = __gt__

    def __eq__(self, other: object) -> bool:
        return self is other  # inputs are positive, and no input is NaN

    __hash__ = object.__hash__


@dataclass(eq=False)
class Number(_Operators):
    """A number of the program: an input, or an operation and the format that its result is rounded to.

    `host`: a number of the host takes the format of the device's number that it meets. `cut`: rounded toward zero.
    """

    operation: str
    parts: tuple[Any, ...]
    format: Format
    host: bool = False
    cut: bool = False

    @property
    def dtype(self) -> Dtype:
        return Dtype(self.format.name)

    def __bool__(self) -> bool:
        return True


class Later(_Operators):
    """A number that is computed when it is asked for, as what nobody asks for has no part in a result."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute
        self.found: Any = None

    @property
    def dtype(self) -> Dtype:
        return now(self).dtype

    def __bool__(self) -> bool:
        return bool(now(self))


def now(value: Any) -> Any:
    """Return a number or a float, computed."""
    if not isinstance(value, Later):
        return value
    if value.found is None:
        value.found = now(value.compute())
    return value.found


class Condition:
    """A comparison that is answered when somebody asks."""

    ndim = 0

    def __init__(self, ask: Callable[[], bool]) -> None:
        self.ask = ask
        self.answer: bool | None = None

    def __bool__(self) -> bool:
        if self.answer is None:
            self.answer = self.ask()
        return self.answer

    def __and__(self, other: Any) -> Condition:
        return Condition(lambda: bool(self) and bool(other))

    def __invert__(self) -> Condition:
        return Condition(lambda: not self)


def given(name: str, form: Format = FLOAT64, *, host: bool = False) -> Number:
    """Return an input: a positive number."""
    return Number("input", (name,), form, host)


def rounded_to(value: Any, form: Format, *, cut: bool = False) -> Any:
    """Return a number rounded to a format: to nearest, or `cut`, toward zero."""
    if not isinstance(value, Number):
        return float(np.float32(value)) if form is FLOAT32 else float(value)
    return value if value.format is form else Number("round", (value,), form, value.host, cut)


def _computed(operation: str, left: Any, right: Any) -> Any:
    if isinstance(left, Later) or isinstance(right, Later):
        return Later(lambda: _computed(operation, now(left), now(right)))
    for one, other in ((left, right), (right, left)):
        if operation == "+" and isinstance(one, Number) and one.operation == "negative":
            return _computed("-", other, one.parts[0])
    numbers = [one for one in (left, right) if isinstance(one, Number)]
    simple = _without_rounding(operation, left, right, numbers)
    if simple is not None:
        return simple
    device = [one for one in numbers if not one.host] or numbers
    parts = tuple(rounded_to(one, device[0].format) for one in (left, right))
    return Number(operation, parts, device[0].format, host=device[0].host)


def _without_rounding(operation: str, left: Any, right: Any, numbers: list[Number]) -> Any:
    """Return the result where it is one of the two, 0 or a float; else None."""
    if not numbers:
        return _PLAIN[operation](left, right)
    plain, right_one = (left, False) if not isinstance(left, Number) else (right, True)
    if isinstance(plain, Number):
        return None
    if plain == 0:
        if operation == "+" or (operation == "-" and right_one):
            return numbers[0]
        return 0.0 if operation != "-" else Number("negative", (right,), right.format, right.host)
    if plain == 1 and (operation == "*" or (operation == "/" and right_one)):
        return numbers[0]
    return 0.0 if plain == math.inf and operation == "/" and right_one else None


_PLAIN = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass
class Way:
    """One way through a function: its comparisons, the answers to them, and the result."""

    answers: list[bool]
    asked: list[tuple[Any, Any]] = field(default_factory=list)
    result: Any = None

    def answer(self, small: Any, large: Any) -> bool:
        """Say whether one number is smaller than another on this way: as before, or first that it is."""
        if not isinstance(small, Number) and not isinstance(large, Number):
            return small < large
        for asked, truth in zip(self.asked, self.answers, strict=False):
            if asked in ((small, large), (large, small)):
                return truth is (asked == (small, large))
        self.asked.append((small, large))
        if len(self.answers) < len(self.asked):
            self.answers.append(True)
        return self.answers[len(self.asked) - 1]

    def known(self) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of which the first number is at most the second."""
        for asked, truth in zip(self.asked, self.answers, strict=True):
            yield asked if truth else asked[::-1]


_WAYS: list[Way] = []


def ways(function: Callable[[], Any]) -> Iterator[Way]:
    """Yield every way through a function."""
    left = [Way([])]
    while left:
        way = left.pop()
        planned = len(way.answers)
        _WAYS.append(way)
        try:
            way.result = now(function())
        finally:
            _WAYS.pop()
        left += [Way([*way.answers[:place], False]) for place in range(planned, len(way.answers))]
        yield way


class Namespace:
    """The operations of an array library on numbers."""

    float32, float64, nan = FLOAT32, FLOAT64, math.nan

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        return Later(lambda: now(yes if condition else no))

    def zeros_like(self, x: Any) -> float:
        return 0.0

    def ones_like(self, x: Any) -> float:
        return 1.0

    def full_like(self, x: Any, value: float) -> float:
        return value

    def abs(self, x: Any) -> Any:
        return x

    def maximum(self, x: Any, y: Any) -> Any:
        return self.where(_Operators.__lt__(x, y), y, x)

    def clip(self, x: Any, low: float, high: float) -> Any:
        # Numbers are positive.
        return self.where(_Operators.__gt__(x, high), high, x) if high < math.inf else x

    def astype(self, x: Any, form: Format) -> Any:
        return Later(lambda: rounded_to(now(x), form))

    def nextafter(self, x: Any, to: Any) -> Any:
        # Asked for below the normal range only, where it subtracts a step, exactly.
        return Later(lambda: Number("step", (now(x), now(x).format.step), now(x).format) if now(x) != 0.0 else 0.0)


class Chain:
    """A product: `errors` says what is rounded on the way to a number, without which it is a constant times `over`.

    Each is a number, or where -1 stands, a divisor.
    """

    def __init__(self, number: Any) -> None:
        self.errors: list[tuple[Number, int]] = []
        self.factors: list[tuple[Number, int]] = []
        self.constant = Fraction(1)
        self._add(number, 1)

    def _add(self, number: Any, sign: int) -> None:
        if not isinstance(number, Number):
            self.constant *= Fraction(number) ** sign
        elif number.operation == "input":
            self.factors.append((number, sign))
        else:
            self.errors.append((number, sign))
            if number.operation not in ("*", "/", "round"):
                self.factors.append((number, sign))
                return
            self._add(number.parts[0], sign)
            if number.operation != "round":
                self._add(number.parts[1], sign if number.operation == "*" else -sign)
