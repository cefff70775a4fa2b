"""A bound on what rounding adds to a sum, in exact arithmetic, with the proof.

Let there be n units of K elements each, and let B be the largest norm that one unit can have after clipping. Let u be
the unit roundoff of the format in which sums are computed, and v that of the format in which they are returned. Write
g(k, u) = k*u / (1 - k*u). A product of k factors, each 1 + d with |d| <= u, differs from 1 by at most g(k, u) (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1).

1. The sum itself. Let p_i be what unit i adds, ||p_i|| <= B. In each coordinate, in any order, a term takes part in at
   most n - 1 additions. So the computed sum is the sum of the terms p_ij, each times a product of n - 1 such factors.
   (A fused multiply and add rounds no more often.) These steps add r more factors, with v in place of u: rounding the
   result, adding k microbatches (k - 1 additions), and dividing by a constant. (The division may be a multiplication by
   the rounded inverse, and the constant itself may be rounded.) Adding m such sums afterwards, in any order, adds m - 1
   more factors with v. If the sums are first rounded to a format of roundoff w, it adds m factors with w instead. So
   each coordinate is off by at most e * sum_i |p_ij|, with
   e = (1 + g(n - 1, u)) * (1 + g(r, v)) * (1 + g(m, w)) - 1. By the triangle inequality, the vector is off by at most
   e * ||sum_i |p_i||| <= e * n * B, where n counts the units of all m sums. The distance between two such sums is off
   by at most twice that.
2. The other units. One example can make a reduction choose a different order or scale. The computed norms of all other
   examples can then change in their last bits. A computed norm of K elements differs from the exact norm by a factor
   with at most (K + 9) / 2 + 3 rounding errors. The coefficient adds 8 more, and the 16 by which it is lowered if it
   is not 1. Compare two computed coefficients of one example. If both are lowered, the 16 cancel, and they differ
   relatively by at most (K + 31) * u. If one of them is 1, only the other has the 8 and the 16, and they differ by at
   most (K + 39) * u. Both are at most s = 2 * (K + 16) * u. (For K < 7, there are fewer operations than counted here.)
   So all p_i together differ by at most s * n * B. Devices that add in float32 add in pairs: for them, replace K by
   twice its number of binary digits.
   (The kernels' sums of half types have larger errors, but give each row the same bits whatever the others hold.)
3. Underflow. Numbers below the normal range may be flushed to zero. This costs at most the smallest normal number for
   each operation of step 1 in each of K coordinates, doubled for the operations that follow.

4. Gradients that come in factors are not made before they are added up. What their sums round is in
   `private/ghost/certificate.py`, step 4. Step 3 here then counts all terms, at most 2**40 in an example.

The bound is the sum of these, divided by the constant. Sums of integers on a grid have no rounding, as long as
each coefficient depends on its own example alone, bit for bit.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from gradclip._src.core.formats import FLOAT64, Format
from gradclip._src.private.ghost.certificate import rounding_of_sum

ASSUMED_ELEMENTS = 2**26
"""The assumed number of elements in one example's gradient if it is neither given nor known from a call."""


class FactoredGradients(NamedTuple):
    """Gradients that come in factors: the most examples that are added up at a time, None for all of a sum.

    `cancel`: an example may have several terms in one matrix, which may cancel.
    """

    examples: int | None
    cancel: bool


@dataclass(frozen=True)
class Summation:
    """How a sum is computed: all that its rounding depends on.

    A device adds up examples in `summed_in`. It rounds the sum of each microbatch to `sum_format`, and adds up
    `microbatches` such sums in that format. `partial_sums` of the results are then added up in `added_in`; None means
    `sum_format`. `factors`: some gradients may come in factors.
    """

    summed_in: Format
    sum_format: Format
    added_in: Format | None
    microbatches: int
    partial_sums: int
    elements: int
    normalize_by: float
    on_grid: bool
    factors: FactoredGradients | None = None

    def bound(self, one: float, count: int | None) -> float:
        """Return what rounding adds to the distance between sums of `count` units with norms of at most `one`."""
        roundings = self._roundings()
        if self.on_grid and not sum(roundings.values()):
            return 0.0
        if count is None:
            return math.nan
        self._check_range(Fraction(one), count)
        additions = Fraction(0) if self.on_grid else _growth(count - 1, self.summed_in)
        factor = 1 + additions
        for element, times in roundings.items():
            factor *= 1 + _growth(times, element)
        apart = 2 * (factor - 1)
        if not self.on_grid:
            in_norm = self.elements if self.summed_in is FLOAT64 else 2 * self.elements.bit_length()
            apart += 2 * (in_norm + 16) * Fraction(self.summed_in.roundoff)
        if self.factors is not None:
            apart += rounding_of_sum(min(count, self.factors.examples or count), cancels=self.factors.cancel)
        each = count * Fraction(self.summed_in.tiny)
        each += sum(times * Fraction(element.tiny) for element, times in roundings.items())
        # Each example may have 2**40 terms.
        each = each if self.factors is None else each * 2**40
        flushed = 4 * (math.isqrt(self.elements) + 1) * each
        moved = apart * count * Fraction(one) / Fraction(self.normalize_by)
        return rounded_up(moved + flushed / Fraction(min(self.normalize_by, 1.0)))

    def _roundings(self) -> dict[Format, int]:
        """Return how often a term is rounded, at most, to each format after the device's own sum."""
        afterwards = self.partial_sums - 1
        found = {self.sum_format: self._of_division()}
        if not self.on_grid:
            found[self.sum_format] += (self.sum_format is not self.summed_in) + self.microbatches - 1
        if self.added_in is not None:
            found[self.added_in] = found.get(self.added_in, 0) + afterwards + 1
        elif not self.on_grid:
            found[self.sum_format] += afterwards
        return found

    def _of_division(self) -> int:
        """Return how often a division rounds: the constant, its inverse, and the product."""
        mantissa = math.frexp(self.normalize_by)[0]
        if mantissa == 0.5:
            return 0
        return 2 if math.ldexp(mantissa, self.sum_format.precision).is_integer() else 3

    def _check_range(self, one: Fraction, count: int) -> None:
        largest = count * one * max(Fraction(1), 1 / Fraction(self.normalize_by))
        for element in (self.sum_format, self.added_in or self.sum_format):
            if largest >= 2 ** (element.max_exponent - 1):
                raise ValueError(
                    f"a sum of {count} units of norm {float(one):g} can overflow {element.name}. Lower max_norm or "
                    "batch_size, or sum in float64."
                )


def _growth(count: int, element: Format) -> Fraction:
    """Return how far a product of `count` rounding factors can be from 1."""
    errors = count * Fraction(element.roundoff)
    if 2 * errors > 1:
        raise ValueError(f"no bound holds for sums of {count} terms in {element.name}. Sum fewer terms, or in float64.")
    return errors / (1 - errors)


def rounded_up(exact: Fraction) -> float:
    """Return the smallest float64 that is not below an exact number."""
    try:
        near = float(exact)
    except OverflowError:
        return math.inf
    return near if math.isinf(near) or near >= exact else math.nextafter(near, math.inf)


def root_up(exact: Fraction) -> float:
    """Return the smallest float64 that is not below the square root of an exact number."""
    # Scale to 128 bits or more, so no float64 lies between the integer root and the exact one.
    shift = max(0, 128 - exact.numerator.bit_length() + exact.denominator.bit_length())
    shift += shift % 2
    scaled = -((-exact.numerator << shift) // exact.denominator)
    root = math.isqrt(scaled)
    return rounded_up(Fraction(root if root * root == scaled else root + 1, 1 << shift // 2))
