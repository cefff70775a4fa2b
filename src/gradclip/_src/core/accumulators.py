"""The norm of a gradient held in parts: by processes, on devices, or in files.

Each holder turns its partial norm into a few accumulators, which are wide numbers. The accumulators of all holders are
added element by element, in any order (for the orders `inf` and `-inf`, the maximum of each element is used instead).
The result is the norm of the whole. So one small reduction serves every layout, whatever the number of arrays.

A sum of powers may leave the range of its format. So there is one accumulator for each of several magnitudes, the
integers k from -K to K. A holder with the norm m * r, r its divisor (or m = 1 and r the norm itself), writes

    T_k = (m * r * 2**(-k*w))**p    for the k with 2**(k*w - w/2) <= r < 2**(k*w + w/2), and zeros for the others.

The outermost accumulators also hold everything beyond. With w*p <= 1400 and at most 200/p digits beyond, all T_k are
between 2**-900 and 2**940. So 2**40 of them can be added in float64, and scaling by a power of two is exact. The
accumulators are then added from the smallest magnitude up. A magnitude two steps below another is at most 2**-300 of it
and is left out; so is anything that becomes subnormal next to a T_k above 2**-700. These are the accumulators of Blue
(A portable Fortran program to find the Euclidean norm of a vector, ACM TOMS 1978), for any order.

The error. Holder i has proven that its exact norm is at most m_i / (1 - d_i). It also writes d_i * T_k, so the sums
give d = sum(d_i * T_i) / sum(T_i). The exact norm is then at most m * (1 + 1.01 * d), provided p * d_i <= 0.01. The
additions over n holders, the powers and the root together add less than three times the error that
`norms.relative_error` states for a sum of n terms. The orders `inf` and `-inf` also carry the largest d_i, which is
zero except for complex numbers.
"""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.norms import Norm, Order, relative_error, rooted
from gradclip._src.core.protocols import Backend
from gradclip._src.core.values import Array
from gradclip._src.words import shown

LARGEST_ORDER = 8.0

_MOST_ERROR = 0.01
"""The proof in this module needs a relative error, times the order, of at most this."""


def check_order(order: Order) -> Order:
    """Return the order. Raises ValueError if its powers would need too many accumulators."""
    if order.extreme or order.p <= LARGEST_ORDER:
        return order
    raise ValueError(
        f"ord must be at most {LARGEST_ORDER:g}, inf or -inf, for gradients held in parts, got {order.p:g}. "
        "For a higher order, pass ord=inf."
    )


def check_wide(backend: Backend) -> None:
    """Raise a ValueError if the backend's numbers lack the range that accumulators need."""
    if backend.wide is not FLOAT64:
        raise ValueError(
            "norms of gradients held in several parts need a device that computes in 64 bits. Move the gradients to "
            "the CPU."
        )


def filled(xp: ModuleType, norm: Norm, order: Order, *, empty: bool | Array = False) -> list[Array]:
    """Return the accumulators of one holder, wide scalars, from its norm; `empty`: the holder has no elements.

    For many norms these are vectors, and `empty` has an entry for each norm or is one for all.
    """
    if order.extreme:
        return [*_extreme(xp, norm.product(), order, empty), xp.zeros_like(norm.value) + norm.error]
    finite = xp.isfinite(norm.value)
    magnitude = xp.where(finite, norm.value if norm.divisor is None else norm.divisor, 1.0)
    factor = 1.0 if norm.divisor is None else xp.where(finite, norm.value, 0.0)
    width, most = _magnitudes(order)
    inside = []
    # Chosen at run time, not a constant: a compiler may square a constant on its own, which leaves the range.
    unit = xp.full_like(magnitude, 2.0 ** (-most * width))
    for k in range(-most, most + 1):
        lowest = 2.0 ** (k * width - width / 2) if k > -most else 0.0
        highest = 2.0 ** (k * width + width / 2) if k < most else math.inf
        inside.append((magnitude >= lowest) & (magnitude < highest))
        unit = xp.where(inside[-1], 2.0 ** (k * width), unit)
    power = (factor * (magnitude / unit)) ** order.p
    totals = [xp.where(here, power, 0.0) for here in inside]
    errors = [total * norm.error for total in totals]
    return [*totals[:-1], xp.where(finite, totals[-1], norm.value), *errors]


def length(order: Order) -> int:
    """Return the number of accumulators of one holder."""
    return 3 if order.extreme else 2 * (2 * _magnitudes(order)[1] + 1)


def check(known: tuple[float, ...], order: Order) -> None:
    """Raise a ValueError if numbers cannot be the accumulators of a norm or sums of accumulators."""
    wanted = length(order)
    if len(known) != wanted:
        raise ValueError(f"numbers must have {wanted} entries for ord={order.p:g}, got {len(known)}.")
    if order.extreme:
        magnitude, unknown, error = known
        right = magnitude >= 0 if order.p > 0 else magnitude <= 0
        right = right and unknown in (0.0, 1.0) and 0 <= error <= _MOST_ERROR
    else:
        totals, errors = known[: wanted // 2], known[wanted // 2 :]
        # The last total is NaN or infinite if an element is.
        pairs = list(zip(totals, errors, strict=True))[: None if math.isfinite(totals[-1]) else -1]
        right = all(0 <= total < math.inf and 0 <= error <= total * _MOST_ERROR / order.p for total, error in pairs)
        right = right and not totals[-1] < 0 and 0 <= errors[-1] < math.inf
    if not right:
        raise ValueError(
            f"numbers for ord={order.p:g} must be what partial_norm returns, or sums of that, got {shown(known)}: one "
            "is out of range, or an error is too large for its sum."
        )


def norm_of(backend: Backend, reduced: Sequence[Any], order: Order, holders: Any) -> Norm:
    """Return the norm that the reduced accumulators of `holders` holders stand for."""
    xp = backend.xp
    if order.extreme:
        return Norm(_extreme_of(xp, reduced[:2], order), None, reduced[2], 0.0)
    width, most = _magnitudes(order)
    count = 2 * most + 1
    decay = 2.0 ** (-width * order.p / 2)  # its square, the step to the next magnitude, may not fit float64
    whole, error = reduced[0], reduced[count]
    divisor = xp.full_like(whole, 2.0 ** (-most * width))
    for k in range(1 - most, most + 1):
        total, of_total = reduced[k + most], reduced[count + k + most]
        # In PyTorch, a choice between two plain numbers is float32, in which the decay is zero.
        below = xp.where(divisor == 2.0 ** ((k - 1) * width), xp.full_like(whole, decay), 0.0)
        whole, error = (
            xp.where(total != 0, total + below * (below * whole), whole),
            xp.where(total != 0, of_total + below * (below * error), error),
        )
        divisor = xp.where(total != 0, 2.0 ** (k * width), divisor)
    share = error / xp.where((whole > 0) & xp.isfinite(whole), whole, 1.0)
    added = relative_error(order, holders * backend.wide.roundoff, backend.wide, exact=False)
    return Norm(rooted(xp, whole, order), divisor, 1.01 * share + 3.0 * added, 0.0)


def _magnitudes(order: Order) -> tuple[int, int]:
    """Return the width w of a magnitude in binary digits, an even number, and the number K of the last."""
    beyond = int(200 / order.p)
    widest = int(1400 / order.p)
    most = math.ceil((1074 - beyond - widest / 2) / widest)
    return 2 * math.ceil((1074 - beyond) / (2 * most + 1)), most


def _extreme(xp: ModuleType, value: Array, order: Order, empty: bool | Array) -> list[Array]:
    """Return a magnitude to maximize (negated for the smallest), and whether it is NaN."""
    unknown = xp.isnan(value)
    number = xp.where(unknown, 0.0, value)
    if order.p < 0:
        nothing = xp.full_like(value, -math.inf)
        number = (nothing if empty else -number) if isinstance(empty, bool) else xp.where(empty, nothing, -number)
    return [number, xp.where(unknown, 1.0, xp.zeros_like(value))]


def _extreme_of(xp: ModuleType, reduced: Sequence[Any], order: Order) -> Array:
    number, unknown = reduced
    if order.p < 0:
        number = xp.where(xp.isinf(number), 0.0, -number)
    return xp.where(unknown > 0, math.nan, number)
