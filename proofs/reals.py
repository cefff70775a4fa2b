"""Inequalities of real numbers: z3 finds no numbers for which they fail."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

from claim import Claim, Loosened, Refuted
from solver import impossible

from gradclip._src.backends.portable import Portable
from gradclip._src.core import norms
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT32, FLOAT64, Format
from gradclip._src.core.layouts import TREE
from gradclip._src.core.norms import EUCLIDEAN, Order

LARGEST = 1.0 / 8
"""The largest error of a sum: of `MOST` terms in float64, in any order."""
MOST = 2**50
ROOT = 10
"""By how many roundings the root and what follows it may be wrong: four, and six where a device has no exact root."""
FLOOR = 2
"""By how many roundings a floor is stated too large."""
_TERMS = "(set-logic QF_NRA)\n"


def _number(value: Any) -> str:
    exact = Fraction(value)
    return f"(/ {exact.numerator} {exact.denominator})"


class Symbol:
    """A real number as z3 reads it. What the source computes with it is another one."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _with(self, operation: str, other: Any) -> Symbol:
        return Symbol(f"({operation} {self.text} {other.text if isinstance(other, Symbol) else _number(other)})")

    def __add__(self, other: Any) -> Symbol:
        return self._with("+", other)

    def __mul__(self, other: Any) -> Symbol:
        return self._with("*", other)

    def __truediv__(self, other: Any) -> Symbol:
        return self._with("/", other)


def _stated(order: Order, wide: Format) -> str:
    """Return the error that the source states of a norm, of which 4u are kept for what follows."""
    symbol: Any = Symbol("s")
    error: Any = norms.relative_error(order, symbol, wide, exact=False)
    return f"(- {error.text} {_number(4 * wide.roundoff)})"


def _roots(wide: Format) -> str:
    """Say that the stated error of order 2 is too small: for a sum s, and a square of what is below the root."""
    u = Fraction(wide.roundoff)
    least, most = (f"(- 1 (+ s {_number(3 * u)}))", f"(/ 1 (- 1 (+ s {_number(3 * u)})))")
    low, high = _number((1 - u) ** ROOT), _number((1 + u) ** ROOT)
    return f"""{_TERMS}(declare-const s Real)
(declare-const root Real)
(define-fun d () Real {_stated(EUCLIDEAN, wide)})
(assert (and (<= 0 s) (<= s {_number(LARGEST)}) (<= 0 root)))
(assert (or
  (and (= (* root root) {least}) (< (* root {low}) (- 1 d)))
  (and (= (* root root) {most}) (> (* root {high} (- 1 d)) 1))))"""


def _sums(wide: Format) -> str:
    """Say that the stated error of order 1 is too small, after as many other roundings."""
    u = Fraction(wide.roundoff)
    return f"""{_TERMS}(declare-const s Real)
(define-fun d () Real {_stated(Order(1.0), wide)})
(assert (and (<= 0 s) (<= s {_number(LARGEST)})))
(assert (or (< (* (- 1 s) {_number((1 - u) ** ROOT)}) (- 1 d))
  (> (* (/ 1 (- 1 s)) {_number((1 + u) ** ROOT)} (- 1 d)) 1)))"""


def _floors(wide: Format) -> str:
    """Say that upper is too small: of a norm m, raised by 1.5u too much after its own roundings, and a floor f."""
    u = Fraction(wide.roundoff)
    return f"""{_TERMS}(declare-const m Real)
(declare-const f Real)
(declare-const raised Real)
(declare-const upper Real)
(assert (and (<= 0 m) (<= 0 f) (< 0 (+ m f))))
(assert (>= raised (* m {_number(1 + 3 * u / 2)})))
(assert (>= upper (* (+ raised f) {_number(1 - u)})))
(assert (< upper (+ m (* f {_number(1 - FLOOR * u)}))))"""


def _checked(text: Callable[[Format], str], wides: tuple[Format, ...]) -> str:
    for wide in wides:
        backend: Any = SimpleNamespace(wide=wide)
        if Portable.sum_error(backend, MOST, Arrays([]), 2.0, TREE) > LARGEST:
            raise Refuted(f"a sum of {MOST} terms may err by more than {LARGEST}")
        impossible(text(wide))
    return "all numbers"


def claims() -> list[Claim]:
    """Return what is claimed of norms and their upper bounds."""
    both, inside = (FLOAT64, FLOAT32), "gradclip._src.core."
    far = Loosened("reals.ROOT", 11), Loosened("reals.MOST", 2**51)
    return [
        Claim("the error of order 2", inside + "norms", "reals.py", partial(_checked, _roots, both), far),
        Claim(
            "the error of order 1",
            inside + "norms",
            "reals.py",
            partial(_checked, _sums, both),
            (Loosened("reals.ROOT", 13),),
        ),
        Claim(
            "the floor beside the rounding of upper",
            inside + "coefficient",
            "reals.py",
            partial(_checked, _floors, both),
            (Loosened("reals.FLOOR", 0),),
        ),
    ]
