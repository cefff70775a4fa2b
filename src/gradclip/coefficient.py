"""The coefficient: what gradients are multiplied by so that their norm is at most the threshold, exactly.

Let N be the exact norm of the gradients, C the threshold `max_norm`. The result y of clipping x satisfies
||y|| <= C in exact arithmetic, for every order, dtype and finite input. The argument:

1. `norms` computes a number m and proves N <= upper, where upper = m / (1 - d) + floor: d bounds the relative
   error of m, and `floor` what elements that the device reads as zero can add. d is 0 where m is exact (then upper
   is m itself) or overstates the error by more than 4u, u the unit roundoff of this arithmetic, which covers
   the rounding of upper and of C in units of the norm's divisor.
2. If upper <= C, the gradients stay as they are, and N <= upper <= C.
3. Otherwise c = (C / upper) * (1 - 16u). Two divisions and that product err by at most u each, relatively, so
   c * (1 + 8u) <= C / N.
4. Each element is multiplied by c in a format that holds it exactly (two multiplications at most, each with relative
   error u, which the remaining 8u cover) and then rounded toward zero in the dtype of its leaf; where that dtype is
   the format itself, results below its normal range become 0. So |y_i| <= (C / N) * |x_i| for every element i.
5. Every norm grows with the magnitudes of the elements, and is homogeneous: ||y|| <= (C / N) * ||x|| = C.

A coefficient of a float64 gradient can lie below float64's normal range (a norm of 1e308 and C = 1), where
step 3 would not hold. Then c is two factors, the second 2**-600, which multiplies exactly or yields a result that
step 4 makes 0. A coefficient below 2**-1600 is 0.

Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013, introduced
clipping by the norm.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradclip.backends import Backend
from gradclip.backends.formats import FLOAT64, format_of
from gradclip.norms import Norm

_SECOND = 2.0**-600


@dataclass(frozen=True)
class Coefficient:
    """What happens to the elements that share a norm; each field is a scalar, or has one value an example.

    `keep`: they stay bit for bit. `blank`: they become zeros. Otherwise they are multiplied by `factor`, and by
    `second` unless that is None.
    """

    keep: Any
    blank: Any
    factor: Any
    second: Any = None


def coefficient(backend: Backend, norm: Norm, max_norm: Any, *, split: bool) -> Coefficient:
    """Return min(1, max_norm / norm), lowered so that the bound of this module's docstring holds.

    `split` asks for two factors: one of the leaves is float64, whose coefficient may be tiny.
    """
    xp = backend.xp
    threshold = xp.where(max_norm < 0, 0.0, max_norm)
    upper = _upper(norm)
    keep = upper <= _in_units_of(norm, threshold)
    divisor = xp.where(upper == 0, 1.0, upper)
    lowered = 1.0 - 16.0 * 2.0**-backend.wide.precision
    plain = _in_units_of(norm, threshold) / divisor * lowered
    never = xp.zeros_like(keep)
    if not (split and backend.wide is FLOAT64):
        return Coefficient(keep, never, _flushed(xp, plain, backend.wide.tiny))
    boosted = _in_units_of(norm, threshold / _SECOND) / divisor * lowered
    one = xp.ones_like(plain)
    tiny = plain < 2.0**-900
    factor = _flushed(xp, xp.where(tiny, boosted, plain), 2.0**-1000)
    return Coefficient(keep, never, factor, xp.where(tiny & ~keep, one * _SECOND, one))


def unit_coefficient(backend: Backend, norm: Norm, max_norm: Any) -> Coefficient:
    """Return min(1 / max_norm, 1 / norm), lowered so that the scaled norm is at most 1.

    It is 1 / norm for `max_norm` 0, and 0 for an infinite `max_norm` or a negative one. Steps 3 to 5 of the module's
    docstring hold with 1 for C and max(upper, max_norm) for upper. It may exceed 1.
    """
    xp = backend.xp
    largest = xp.maximum(_upper(norm), _in_units_of(norm, max_norm))
    inverse = 1.0 / xp.where(largest == 0, 1.0, largest)
    lowered = 1.0 - 16.0 * 2.0**-backend.wide.precision
    highest = 2.0 ** (backend.wide.max_exponent - 2)
    factor = xp.where(inverse > highest, highest, inverse) * lowered
    factor = factor if norm.divisor is None else factor / norm.divisor
    factor = xp.where(max_norm < 0, 0.0, _flushed(xp, factor, backend.wide.tiny))
    never = xp.zeros_like(norm.value, dtype=bool)
    return Coefficient(never, never, factor)


def from_norm(backend: Backend, total_norm: Any, max_norm: Any, arrays: Sequence[Any]) -> Coefficient:
    """Return the coefficient for a norm that is given, and right but for rounding to float32."""
    norm = Norm(backend.scalar(total_norm, arrays), None, 2.0**-23, 0.0)
    threshold = backend.scalar(max_norm, arrays)
    chosen = coefficient(backend, norm, threshold, split=needs_split(backend, arrays))
    return replace(chosen, keep=norm.value <= threshold)


def needs_split(backend: Backend, arrays: Sequence[Any]) -> bool:
    """Say whether an array is as wide as the arithmetic, so that its coefficient may be tiny."""
    return any(format_of(x) == backend.wide for x in arrays)


def _in_units_of(norm: Norm, threshold: Any) -> Any:
    return threshold if norm.divisor is None else threshold / norm.divisor


def _flushed(xp: Any, factor: Any, smallest: float) -> Any:
    return xp.where(factor < smallest, 0.0, factor)


def _upper(norm: Norm) -> Any:
    return norm.value * (1.0 / (1.0 - norm.error)) + _in_units_of(norm, norm.floor)


def undecided(norm: Norm, max_norm: float) -> bool:
    """Say whether a known norm is too close to the threshold for its error bound to tell which is larger."""
    lower = norm.value * (1.0 - 2.0 * norm.error)
    return bool(lower <= _in_units_of(norm, max_norm) < _upper(norm))


def exceeds(norm: Norm, max_norm: Any) -> Any:
    """Say whether the computed norm is larger than the threshold: what counts as clipped."""
    return norm.value > _in_units_of(norm, max_norm)


def check_threshold(value: Any, name: str = "max_norm") -> Any:
    """Return a threshold that is a number as a float; leave a scalar array as it is.

    Raises TypeError for what is no number and ValueError for a negative number or NaN.
    """
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if math.isnan(number) or number < 0:
            raise ValueError(
                f"{name} must not be negative or NaN, got {value!r}. To switch clipping off pass {name}=math.inf."
            )
        return number
    if getattr(value, "shape", None) == () and hasattr(value, "dtype"):
        return value
    raise TypeError(
        f"{name} must be a number or a scalar array, got {value!r} of type {type(value).__name__}. "
        f"For a float threshold write {name}=1.0."
    )


def known_threshold(backend: Backend, value: Any, name: str = "max_norm") -> Any:
    """Return a checked threshold as a float where the backend may look at its value."""
    if isinstance(value, float) or not backend.concrete:
        return value
    return check_threshold(float(value), name)
