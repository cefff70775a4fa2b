"""The divisor for fused optimizers: gradients divided by it never exceed the threshold, even by rounding.

Fused optimizers of PyTorch divide each element by one float32 number S as they read it. Let x be the gradients in
memory, S0 the divisor they already need (that of scaled losses, else 1), C the threshold, and y the quotients. The
result satisfies ||y|| <= C in exact arithmetic. The proof, with v = 2**-24:

1. The threshold of x is T <= C * S0. It is exact if S0 is a power of two, else lowered by 4v.
2. If N, the exact norm of x, is at most T, then S = S0. Division by a power of two is exact in the normal range. Any
   other division adds at most v, relatively, which lowering T has covered.
3. Otherwise `coefficient` proves c <= T / N. Then S = S0 / c * (1 + 2v + 2**-48) is computed in float64, which loses
   less than 2**-49, and rounded to float32: S >= S0 / c * (1 + 2v + 2**-49) / (1 + v).
4. Rounding to nearest increases a quotient by a factor of at most (1 + 2v) / (1 + v), even if it is formed in float64
   first. So |y_i| <= (c / S0) * (1 - 2**-50) * |x_i|, or larger by 2**-150 below float32's normal range.
5. Fewer than 2**50 such elements add less than 2**-100 to a norm. With C >= 2**-50 that is at most C * 2**-50, which
   the factor (1 - 2**-50) covers.

If step 2 keeps an S0 other than 1, quotients below the normal range may be larger by 2**-150 each. If S would leave
float32's range, it is infinite, and finite gradients become zeros. The division is assumed to be that of IEEE 754, as
on CPUs and in CUDA without fast math.
"""

import math

from gradclip.core.protocols import Backend
from gradclip.core.records import Coefficient
from gradclip.core.values import Array

SMALLEST, LARGEST = 2.0**-50, 2.0**100
"""The proof holds for thresholds in this range, and for 0 and inf."""

_RAISED = 1.0 + 2.0**-23 + 2.0**-48


def check_foldable(max_norm: float) -> float:
    """Return the threshold. Raises ValueError if this module's proof does not cover it."""
    if max_norm in (0.0, math.inf) or SMALLEST <= max_norm <= LARGEST:
        return max_norm
    raise ValueError(
        f"max_norm must be 0, inf, or between 2**-50 and 2**100 to fold into a step, got {max_norm!r}: the optimizer "
        "divides in float32. Call gradclip.clip_grad_norm_ before the step instead."
    )


def within_range(backend: Backend, max_norm: Array) -> Array:
    """Return an adaptive threshold, moved to the nearest one that this module's proof covers."""
    xp = backend.xp
    nearest = xp.minimum(xp.maximum(max_norm, SMALLEST * xp.ones_like(max_norm)), LARGEST * xp.ones_like(max_norm))
    return xp.where((max_norm == 0) | xp.isinf(max_norm), max_norm, nearest)


def threshold_of_scaled(backend: Backend, max_norm: float | Array, given: Array) -> Array:
    """Return the threshold of gradients that will be divided by `given`: step 1 of this module's docstring."""
    exact = backend.xp.abs(backend.xp.frexp(given)[0]) == 0.5
    scaled = given * max_norm
    return backend.xp.where(exact, scaled, scaled * (1.0 - 2.0**-22))


def divisor(backend: Backend, coefficient: Coefficient, given: Array) -> Array:
    """Return the divisor from the coefficient of scaled gradients: steps 2 and 3; NaN if the coefficient is NaN."""
    xp, factors = backend.xp, coefficient.wide
    c = factors.first if factors.second is None else factors.first * factors.second
    beyond = c < given * 2.0**-126
    raised = given / xp.where(beyond, 1.0, c) * _RAISED
    return xp.where(coefficient.keep, given, xp.where(beyond, math.inf, raised))
