"""The coefficient that gradients are multiplied by, so that their norm never exceeds the threshold, even by rounding.

Let N be the exact norm of the gradients and C the threshold `max_norm`. The result y of clipping x satisfies
||y|| <= C in exact arithmetic, for every order, dtype and finite input. The proof:

1. `norms` computes a number m and proves N <= upper, where upper = m / (1 - d) + floor. Here d bounds the relative
   error of m. `floor` bounds what elements can add that the device reads as zero, or rounds to its smallest step.
   If m is exact, d is 0, and without a floor upper is m itself; with one, N is at most the larger of m and `floor`.
   Otherwise d overstates the error by more than 4u, where u is the unit roundoff of this arithmetic. These 4u cover the
   rounding of upper, and of C in units of the norm's divisor, except for the share of `floor`. That is itself stated by
   at least 2u too large: what is read as zero is below the smallest normal number (proofs/reals.py).
2. If upper <= C, the gradients stay unchanged, and N <= upper <= C.
3. Otherwise c = (C / upper) * (1 - 16u). Two divisions and that product err by at most u each, relatively, so
   c * (1 + 8u) <= C / N.
4. Each element is multiplied by c in a format that holds the element exactly, rounding to nearest. The format is that
   of this arithmetic, or float32.
   In this arithmetic, the remaining 8u cover at most two multiplications.
   In float32, c is first lowered by 2v, v = 2**-24: one v for rounding c to float32, one for the product, since
   (1 - 2v) * (1 + v)**2 < 1 - 3v**2, and 3v**2 covers the roundoff of (1 - 2v) * c.
   The product is then rounded toward zero in the dtype of its leaf. If it is below the normal range of the format it
   was computed in, rounding may have added half a step, so it is moved one step toward zero, or to zero.
   So |y_i| <= (C / N) * |x_i| for every element i.
   The half types, float32 and the parts of complex64 are multiplied in float32. A normal float32 result is less than
   four units in its last place below the exact product with c: at most 3v, relatively, plus half a unit. Of all half
   numbers, and of float32 and float64 numbers of each exponent, none is above it (proofs/halves.py, proofs/floats.py).
5. Every norm grows with the magnitudes of the elements and is homogeneous: ||y|| <= (C / N) * ||x|| = C.

A coefficient can be outside the normal range of the product's format (float64: a norm of 1e308 and C = 1e-20), where
steps 3 and 4 would not hold. It is then split into two factors. One is a power of two: multiplying by it is exact,
unless the product falls below the normal range. From there it may be rounded once more, up to the smallest normal
number, so the other factor of float32 is lowered by another v; results are then less than five units too low. A
coefficient below 2**-2041 (float64) or 2**-252 (float32) is 0.

Checked by machine: proofs/coefficient.py.

Compilers may turn (a / b) / c into a / (b * c), or a / b into a * (1 / b). So divisors of norms are powers of two
here (`settled`), and no number is near the ends of the range unless the result needs it.

Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013, introduced clipping by
norm.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64, product_format
from gradclip._src.core.layouts import Several
from gradclip._src.core.protocols import Backend
from gradclip._src.core.rules import CLIP, LOWERED, LOWERED_BY, Coefficient, Factors, Target, raised_by
from gradclip._src.core.values import Arithmetic, Array

if TYPE_CHECKING:
    from gradclip._src.core.norms import Norm

_WIDE_SECOND = 2.0**-1020
_WIDE_FIRST = 2.0**1000
_NARROW_SECOND = 2.0**-126
NARROW_LOWERED = 1.0 - 2.0**-23
_TWICE_ROUNDED = 1.0 - 2.0**-24


def coefficient(
    backend: Backend, norm: Norm, max_norm: float | Array, target: Target = CLIP, *, split: bool = False
) -> Coefficient:
    """Return the coefficient of a settled norm, lowered so that the bound in this module's docstring holds.

    If the target never keeps elements, read numerator for C in steps 3 to 5, and max(upper, keep_up_to) for upper; the
    coefficient may then exceed 1. `split` asks for two factors: a leaf is float64, so the coefficient may be tiny.
    """
    xp = backend.xp
    rule = target.rule(xp, max_norm)
    upper = _upper(norm, rule.offset)
    fits = upper <= _in_units_of(norm, rule.keep_up_to)
    never = xp.zeros_like(fits)
    if not target.keeps:
        larger = upper if target.gamma is not None else xp.maximum(upper, _in_units_of(norm, rule.keep_up_to))
        return _never_kept(backend, norm, rule.numerator, xp.where(larger == 0, 1.0, larger), never)
    if backend.concrete and fits.all():
        unused = Factors(upper)
        return Coefficient(fits, never, unused, unused)
    plain = _quotient(backend, norm, rule.numerator, xp.where(fits, 1.0, upper))
    narrow = _narrow(backend, plain)
    if not (split and backend.wide is FLOAT64):
        return Coefficient(fits, never, Factors(_flushed(xp, plain, backend.wide.tiny)), narrow)
    return Coefficient(fits, never, _tiny_too(backend, norm, rule.numerator, upper, plain, ~fits), narrow)


KEPT = ((1.0, 1.0), (1.0, 1.0))
ERROR_OF_KNOWN = 2.0**-23
"""The relative error of a norm that the caller gives, which is right up to rounding to float32."""


def of_number(
    norm: float, error: float, max_norm: float, *, as_it_is: bool = False
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Return the factors, wide and narrow, that `coefficient` finds for one ordinary norm; `KEPT` if elements stay.

    Return None if the error bound does not decide which is larger, or if a factor is below the normal range of float32.
    A norm may be compared `as_it_is`.
    """
    upper = norm * (1.0 / (1.0 - error))
    if (norm if as_it_is else upper) <= max_norm:
        return KEPT
    wide = max_norm / upper * LOWERED if upper else 0.0
    narrow = wide * NARROW_LOWERED
    # A negative or NaN threshold fails this comparison.
    if not narrow >= _NARROW_SECOND or (norm * (1.0 - 2.0 * error) <= max_norm and not as_it_is):
        return None
    return (wide, 1.0), (narrow, 1.0)


def _never_kept(backend: Backend, norm: Norm, numerator: Array, larger: Array, never: Array) -> Coefficient:
    """Return numerator / larger, lowered, for a target that never keeps elements. `larger` is as in `_quotient`."""
    xp = backend.xp
    plain = _quotient(backend, norm, numerator, larger)
    if norm.divisor is None or backend.wide is not FLOAT64:
        highest = 2.0 ** (backend.wide.max_exponent - 2)
        plain = _flushed(xp, xp.where(plain > highest, highest, plain), backend.wide.tiny)
        return Coefficient(never, never, Factors(plain), _narrow(backend, plain))
    wide = _tiny_too(backend, norm, numerator, larger, plain, ~never)
    huge = plain > 2.0**1010
    # The norm is then below 2**14, and its divisor at most 1.
    reduced = xp.where(huge, larger, 1.0) * (xp.where(huge, norm.divisor, 1.0) * _WIDE_FIRST)
    rest = xp.clip(numerator / reduced * _lowered(backend), 0.0, 2.0**1022)
    first = xp.where(huge, xp.full_like(plain, _WIDE_FIRST), wide.first)
    wide = Factors(first, xp.where(huge, rest, wide.second))
    return Coefficient(never, never, wide, _narrow(backend, plain))


def _quotient(backend: Backend, norm: Norm, numerator: Array, larger: Array) -> Array:
    """Return numerator / larger, lowered; 0 if it is tiny. `larger` is in units of the norm's divisor."""
    above = _in_units_of(norm, numerator)
    above = above if norm.divisor is None else _flushed(backend.xp, above, backend.wide.tiny)
    return above / larger * _lowered(backend)


def _tiny_too(backend: Backend, norm: Norm, numerator: Array, larger: Array, plain: Array, scaled: Array) -> Factors:
    """Return the factors of a float64 quotient: `plain`, or two if it is tiny. Only `scaled` entries are used."""
    xp = backend.xp
    one = xp.ones_like(plain)
    tiny = scaled & (plain < _WIDE_SECOND)
    little = larger < 1.0
    # Divided by `second`, in two steps: 2**880 and this. Compilers multiply in any order, often by constants last. No
    # order leaves the range, since 2**880 / larger is below 2**1011.
    boost = xp.where(little, one, one * 2.0**140)
    if norm.divisor is not None:
        boost = boost * xp.where(norm.divisor > 1, one * 2.0**-512, xp.where(norm.divisor < 1, 0.0, one))
    # Chosen at run time, not a constant.
    raised = xp.where(tiny, numerator, 0.0) * xp.where(tiny, one * 2.0**880, one)
    # With a smaller `larger`, the quotient is so tiny only if the numerator is 0, or is read as 0.
    boosted = raised * (boost / xp.where(tiny & (larger > 2.0**-130), larger, math.inf) * _lowered(backend))
    first = _flushed(xp, xp.where(tiny, boosted, plain), 2.0**-1021)
    second = xp.where(little, one * 2.0**-880, one * _WIDE_SECOND)
    return Factors(first, xp.where(tiny, second, one))


def _lowered(backend: Backend) -> float:
    return 1.0 - LOWERED_BY * backend.wide.roundoff


def _narrow(backend: Backend, factor: Array) -> Factors:
    """Return the factors of float32 products: a wide factor, lowered, and split if it leaves float32's range."""
    if backend.wide is not FLOAT64:
        return Factors(_flushed(backend.xp, factor, backend.wide.tiny))
    xp = backend.xp
    lowered = factor * NARROW_LOWERED
    one = xp.ones_like(factor)
    tiny, huge = lowered < _NARROW_SECOND, lowered > 2.0**100
    first = xp.where(tiny, lowered / _NARROW_SECOND * _TWICE_ROUNDED, lowered)
    first = _flushed(xp, first, _NARROW_SECOND)
    capped = xp.where(huge, xp.where(lowered > 2.0**200, one * 2.0**200, lowered), one) * _NARROW_SECOND
    first = xp.where(huge, one / _NARROW_SECOND, first)
    second = xp.where(tiny, one * _NARROW_SECOND, xp.where(huge, capped, one))
    return Factors(xp.astype(first, xp.float32), xp.astype(second, xp.float32))


def needs_split(backend: Backend, arrays: Arrays) -> bool:
    """Return whether an array is as wide as the arithmetic, so that its coefficient may be tiny."""
    return backend.wide in arrays.formats


def of_each_array(backend: Arithmetic, coefficient: Coefficient, layout: Several, arrays: Arrays) -> list[Coefficient]:
    """Return the coefficient of each array, from vectors with one entry for each group."""
    narrow = any(product_format(x, backend.wide) is not backend.wide for x in arrays)
    factors = coefficient.factors()[: 4 if narrow else 2]
    given = [coefficient.keep, coefficient.blank, *(x for x in factors if x is not None)]
    found = iter(backend.unstacked(given))
    keeps, blanks = next(found), next(found)
    nothing = [None] * len(keeps)
    scalars = [nothing if factor is None else next(found) for factor in factors]
    wides = list(map(Factors, *scalars[:2]))
    each = list(map(Coefficient, keeps, blanks, wides, map(Factors, *scalars[2:]) if narrow else wides))
    return [one for one, part in zip(each, layout.parts, strict=True) for _ in part.indices]


def _in_units_of(norm: Norm, threshold: float | Array) -> Any:
    """Return a threshold in units of the divisor of a settled norm."""
    return threshold if norm.divisor is None else threshold / norm.divisor


def _flushed(xp: ModuleType, factor: float | Array, smallest: float) -> Array:
    return xp.where(factor < smallest, 0.0, factor)


def _upper(norm: Norm, offset: float = 0.0) -> Array:
    """Return upper for a rule with an offset, in units of the norm's divisor, including error and floor."""
    # PyTorch divides a number by multiplying with the inverse, so 0 / 1e-320 is NaN.
    floor = 0.0 if isinstance(norm.floor, float) and norm.floor == 0 else _in_units_of(norm, norm.floor)
    return raised_by(norm.value, 1.0 / (1.0 - norm.error), floor + _in_units_of(norm, offset) if offset else floor)


def undecided(norm: Norm, max_norm: float | Array) -> bool:
    """Return whether a known norm is so close to the threshold that its error bound does not decide which is larger."""
    return bool(open_between(norm, max_norm))


def open_between(norm: Norm, max_norm: float | Array) -> Array:
    """Return the same as `undecided`, as an array: for one norm, or for each of many."""
    threshold = _in_units_of(norm, max_norm)
    lower = norm.value * (1.0 - 2.0 * norm.error)
    lower = lower - _in_units_of(norm, norm.floor) if norm.floor else lower
    return (lower <= threshold) & (threshold < _upper(norm))


def exceeds(norm: Norm, max_norm: float | Array, times: float = 1.0) -> Array:
    """Return whether the computed norm is larger than the threshold, that is, counts as clipped; or so many times it.

    The norm and the multiple may be beyond the range of any number.
    """
    threshold = _in_units_of(norm, max_norm)
    return norm.value > (threshold if times == 1.0 else threshold * times)


def not_above_integer(backend: Arithmetic, value: Array) -> Array:
    """Convert an integer to the wide format, not rounded up: a threshold must not become larger."""
    xp, most = backend.xp, 2.0**backend.wide.precision
    nearest = xp.astype(value, getattr(xp, backend.wide.name))
    # A comparison would round the integer, too. So beyond those that are exact, all are lowered by one step.
    return xp.where(nearest > most, nearest * (1.0 - 2.0 / most), nearest)
