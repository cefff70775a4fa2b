"""From operations that round to a script for Gappa, with the hints that it needs.

The hints follow from the operations. A product or quotient is what it would be without roundings, times one factor
1 + error for each of them. Below the normal range the last rounding has an absolute error instead, so it stands apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from claim import Refuted
from gappa import literal, proves
from traced import Chain, Number, Way

Hint = Callable[["Script"], str]
HUGE = Fraction(2) ** 7000
"""More than any number here."""

Range = tuple[str, Fraction | float, Fraction | float]
"""An expression, and the range that it is in."""


class Script:
    """Definitions of numbers, each by one operation, and hints."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def name(self, number: Any) -> str:
        """Return the name of a number in the script, which defines it."""
        if not isinstance(number, Number):
            return literal(number)
        text = f"{number.parts[0]}_" if number.operation == "input" else self.exact(number)
        cut = "_cut" if number.cut else ""
        full = text if number.operation == "step" else f"{number.format.name}{cut}({text})"
        if full not in self._names:
            self._names[full] = number.parts[0] if number.operation == "input" else f"v{len(self._names)}"
            self.lines.append(f"{self._names[full]} = {full};")
        return self._names[full]

    def exact(self, number: Number) -> str:
        """Return the operation of a number, without the rounding of its result."""
        if number.operation == "input":
            return number.parts[0]
        if number.operation == "round":
            return self.name(number.parts[0])
        left, right = number.parts
        if number.operation == "step":
            return f"{self.name(left)} - {self.name(right)}"
        if number.operation == "/" and not isinstance(right, Number) and _is_power_of_two(right):
            return f"{self.name(left)} * {literal(1 / Fraction(right))}"
        return f"{self.name(left)} {number.operation} {self.name(right)}"

    def ratio(self, text: str, number: Any, target: Target, *, last: bool = True) -> str:
        """Return the hint that says what text / T is: of a number, or of its operation before the `last` rounding."""
        found = Chain(number)
        errors = found.errors[0 if last else 1 :]
        above, below = Counter(target.under), Counter(target.over)
        for one, sign in found.factors:
            (above if sign > 0 else below)[self._atom(one)] += 1
        right = " * ".join(sorted((above - below).elements()))
        left = " * ".join(sorted((below - above).elements()))
        constant = found.constant / Fraction(target.factor)
        rest = f"{right or '1b0'} / ({left})" if " * " in left else f"{right or '1b0'} / {left}" if left else right
        if constant != 1 or not rest:
            rest = f"{literal_ratio(constant)} * ({rest})" if rest else literal_ratio(constant)
        nonzero = {*above, *below}
        for one, sign in reversed(errors):
            own, name = self._own(one), self.name(one)
            nonzero |= {own, name} if sign < 0 else {own}
            error = f"(1 + ({name} - {own}) / {own})"
            rest = f"{error} * ({rest})" if sign > 0 else f"(1 / {error}) * ({rest})"
        zero = ", ".join(f"{one} <> 0" for one in sorted(nonzero))
        return f"{text} / T -> {rest} {{ {zero} }};"

    def _own(self, number: Number) -> str:
        text = self.exact(number)
        return text if text.isidentifier() else f"({text})"

    def _atom(self, number: Number) -> str:
        return number.parts[0] if number.operation == "input" else f"({self.exact(number)})"


class Target(NamedTuple):
    """What a result may not exceed: a product of numbers, expressions and a factor, divided by others; and `added`."""

    over: Sequence[str]
    under: Sequence[str] = ()
    factor: Fraction | float = 1
    added: Fraction | float = 0

    def __str__(self) -> str:
        factor = [literal_ratio(Fraction(self.factor))] if self.factor != 1 else []
        return " * ".join([*factor, *self.over]) + (f" / ({' * '.join(self.under)})" if self.under else "")


def literal_ratio(value: Fraction) -> str:
    """Return a fraction, exactly."""
    return literal(value) if _is_dyadic(value) else f"({value.numerator} / {value.denominator})"


def _is_power_of_two(value: float) -> bool:
    return _is_dyadic(Fraction(value)) and _is_dyadic(1 / Fraction(value))


def _is_dyadic(value: Fraction) -> bool:
    return value.denominator & (value.denominator - 1) == 0


def split(expression: str, *edges: Fraction | float) -> list[Range]:
    """Return consecutive ranges of an expression, which together are everything between the first and the last edge."""
    assert list(edges) == sorted(edges)
    return [(expression, *pair) for pair in pairwise(map(Fraction, edges))]


Splits = Callable[[Script, Number | None], Iterable[list[Range]]]
"""What is to be split into ranges, given the script of a result and the operation that is rounded last, if any."""


def proven(script: Script, ranges: Iterable[Range], goal: str, *hints: Sequence[str]) -> None:
    """Raise `Refuted` unless Gappa proves the goal in these ranges, with one of several lists of hints."""
    given = " /\\ ".join(f"{text} in [{literal(low)}, {literal(high)}]" for text, low, high in ranges)
    begin = "\n".join([*script.lines, f"{{ {given} -> {goal} }}", ""])
    if not any(proves(begin + "\n".join(some)) for some in hints or [()]):
        raise Refuted("Gappa does not prove this:\n" + begin + "\n".join(hints[-1] if hints else ()))


def never_above(way: Way, target: Target, inputs: Sequence[Range], splits: Splits, *more: Hint) -> int:
    """Prove that the result of a way is never above the target, in all ranges. Return how many these were.

    Each of `more` is a hint, which is tried alone.
    """
    script, result = Script(), way.result
    if result == 0.0:
        return 0
    hints, last = _hints(script, result, target) if isinstance(result, Number) else ([], None)
    hints = [[*some, *extra] for some in hints for extra in ([[one(script)] for one in more] or [[]])]
    known = _known(script, way)
    script.lines.append(f"T = {target};")
    ranges = [*inputs, ("T", 1 / HUGE, HUGE), *known]
    if any(low > high for _, low, high in known):
        return 0
    return _in_all(
        script, ranges, f"{script.name(result)} - T <= {literal(target.added)}", hints, list(splits(script, last))
    )


def _in_all(script: Script, ranges: list[Range], goal: str, hints: list[list[str]], splits: list[list[Range]]) -> int:
    """Prove a goal in each combination of ranges, but for those that a way does not lead to."""
    try:
        # Without hints Gappa sees this at once.
        proven(script, ranges, goal)
    except Refuted:
        if splits:
            return sum(_in_all(script, [*ranges, one], goal, hints, splits[1:]) for one in splits[0])
        if not hints:
            raise
        proven(script, ranges, goal, *hints)
    return 1


def _hints(script: Script, result: Number, target: Target) -> tuple[list[list[str]], Number]:
    """Return hints for a relative error of the last rounding and for an absolute one; and where it is rounded last."""
    name, last, cut, step = script.name(result), result, [], ""
    if last.cut:
        last = result.parts[0]
        text = script.name(last)
        cut = [f"{name} - T -> ({name} - {text}) + ({text} - T);"]
        name = text
    if last.operation == "step":
        last, step = last.parts[0], f" - {literal(last.parts[1])}"
    before = script.exact(last)
    absolute = f"({script.name(last)} - ({before})){step}"
    below = [
        *cut,
        f"{name} - T -> {absolute} + T * (({before}) / T - 1) {{ T <> 0 }};",
        script.ratio(f"({before})", last, target, last=False),
    ]
    both = []
    if last.operation == "round" and isinstance(last.parts[0], Number) and last.parts[0].operation == "*":
        first = script.exact(last.parts[0])
        errors = f"({script.name(last)} - {before}) + ({before} - {first})"
        ratio = script.ratio(f"({first})", last.parts[0], target, last=False)
        both = [[f"{name} - T -> {errors} + T * (({first}) / T - 1) {{ T <> 0 }};", ratio]]
    normal = [*cut, f"{name} - T -> T * ({name} / T - 1) {{ T <> 0 }};"]
    return [below] if step else [[*normal, script.ratio(name, last, target)], below, *both], last


def _known(script: Script, way: Way) -> list[Range]:
    """Return the ranges that comparisons with constants leave."""
    found: dict[str, tuple[Any, Any]] = {}
    for small, large in way.known():
        for number, low, high in ((small, -HUGE, large), (large, small, HUGE)):
            if isinstance(number, Number) and not (isinstance(low, Number) or isinstance(high, Number)):
                name = script.name(number)
                before = found.get(name, (-HUGE, HUGE))
                found[name] = max(before[0], low), min(before[1], high)
    return [(name, *pair) for name, pair in found.items()]


def around(script: Script, last: Number) -> list[Range]:
    """Split what is rounded, where its result becomes normal: just below it, just above it, and far from it."""
    tiny, step = Fraction(last.format.tiny), Fraction(last.format.step)
    return split(script.exact(last), 0, tiny - step * Fraction(3, 4), 2 * tiny, HUGE)


def operations(way: Way) -> Iterator[Number]:
    """Yield the operations that lead to a result, or to a comparison on its way."""
    left = [way.result, *(one for pair in way.known() for one in pair)]
    while left:
        number = left.pop()
        if isinstance(number, Number):
            yield number
            left += number.parts
