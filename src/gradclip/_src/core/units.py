"""Units: the parts of a layer with their own norms, for example all weights of one output; adaptive thresholds.

Adaptive clipping limits the norm of each unit's gradient to `clipping * max(N, eps)`, N the norm of the unit itself
(Brock, De, Smith and Simonyan, "High-Performance Large-Scale Image Recognition Without Normalization", 2021).

The computed threshold T is at most that, exactly. `norms` computes a number m with a relative error of at most d, plus
at most `floor`, so N >= m (1 - d) - floor. Fewer than 8 roundings lead from m to T. Each errs by at most u, relatively,
the unit roundoff of this arithmetic, and T is lowered by 16u. A T or N so small that numbers may be too coarse for that
counts as 0. Then `coefficient` proves that the norm of the result is at most T.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.derivative import At, ClipRule
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.norms import Norm
from gradclip._src.core.protocols import Axes, Backend
from gradclip._src.core.values import Array

_COARSE = FLOAT64.tiny * 2.0**22


@dataclass(frozen=True)
class Adaptive:
    """Thresholds that follow the norms of parameters.

    `known`: `clipping` and `eps`, None if traced. `as_arrays`: which of them are differentiable arrays; each call
    passes these.
    """

    known: tuple[float | None, float | None]
    as_arrays: tuple[bool, bool] = (False, False)

    def settings(self, given: Sequence[Any]) -> list[Any]:
        """Return `clipping` and `eps`, filling in the arrays of a call."""
        rest = list(given)
        return [rest.pop(0) if came else known for known, came in zip(self.known, self.as_arrays, strict=True)]

    def of_norm(self, backend: Backend, norm: Norm, arrays: Arrays, given: Sequence[Any]) -> Array:
        """Return the threshold of each unit of parameters from its norm, as in this module's docstring."""
        both = zip(self.known, self.settings(given), strict=True)
        # Not a generator: `torch.compile` does not support it here.
        clipping, eps = [backend.scalar(one if known is None else known, arrays) for known, one in both]
        return _lowered(backend, norm, clipping, eps)


def _lowered(backend: Backend, norm: Norm, clipping: Array, eps: Array) -> Array:
    xp, largest, coarse = backend.xp, backend.wide.largest, backend.wide.tiny * 2.0**22
    # A norm beyond the range is at least the largest finite number.
    lower = xp.clip(norm.product(), 0.0, largest) * (1.0 - norm.error) - norm.floor
    base = xp.maximum(xp.where(lower < coarse, 0.0, lower), eps)
    product = base * clipping * (1.0 - 16.0 * backend.wide.roundoff)
    product = xp.where((clipping == 0) & (base == math.inf), 0.0, product)  # not NaN
    threshold = xp.where(product < coarse, 0.0, xp.clip(product, 0.0, largest))
    return xp.where(clipping == math.inf, math.inf, threshold)


def thresholds_of_vector(norms: np.ndarray, error: Any, clipping: float, eps: float) -> np.ndarray | None:
    """Return the thresholds for norms below 2**127, each with its error, in float64 arithmetic.

    None for settings that are so small or large that a threshold could leave its usual range.
    """
    if not (eps * min(clipping, 1.0) > 2 * _COARSE and max(eps, 2.0**127) * max(clipping, 1.0) < 2.0**1000):
        return None
    return np.maximum(norms * (1.0 - error), eps) * clipping * (1.0 - 16.0 * FLOAT64.roundoff)


@dataclass(frozen=True)
class AdaptiveRule:
    """How a gradient x, clipped to adaptive thresholds, changes with x, the parameter w, `clipping` and `eps`.

    With T = clipping * max(N, eps), dT = dclipping * max(N, eps) + clipping * (dN if N > eps, else deps). `rule` is
    that of x.
    """

    measures: ClassVar[bool] = True

    rule: ClipRule
    adaptive: Adaptive
    axes: Axes | None = None

    def over(self, axes: Axes) -> "AdaptiveRule":
        """Return the rule for units that are sharded over mesh axes."""
        return replace(self, rule=self.rule.over(axes), axes=axes)

    def at(self, leaves: Sequence[Array], norm: Array, max_norm: None, mask: None) -> At:
        """Return the point of a call: x, w, those of `clipping` and `eps` given as arrays, and the norms of x."""
        return At(leaves, norm, max_norm)

    def jvp(
        self, xp: ModuleType, at: At, changes: Sequence[Array], change: float, dtypes: Sequence[Any]
    ) -> tuple[list[Array], Array]:
        """Return the changes of the clipped gradient and of its norms."""
        (x, w, *given), (dx, dw, *others) = at.leaves, changes
        of = self._threshold(xp, w, at.norm, given)
        dclipping, deps = Adaptive((0.0, 0.0), self.adaptive.as_arrays).settings(others)
        _, dsize = self._of_parameter.jvp(xp, At([w], of.size, math.inf), [dw], 0.0, [])
        dthreshold = of.base * dclipping + of.slope * xp.where(of.above, dsize, xp.zeros_like(dsize) + deps)
        return self.rule.jvp(xp, At([x], at.norm, of.threshold), [dx], dthreshold, dtypes)

    def vjp(self, xp: ModuleType, at: At, gys: Sequence[Array], gnorm: Array) -> tuple[list[Array], float]:
        """Return the gradients for the leaves of the point."""
        x, w, *given = at.leaves
        of = self._threshold(xp, w, at.norm, given)
        gxs, gthreshold = self.rule.vjp(xp, At([x], at.norm, of.threshold), gys, gnorm)
        gbase = gthreshold * of.slope
        gsize = xp.where(of.above, gbase, xp.zeros_like(gbase))
        gws, _ = self._of_parameter.vjp(xp, At([w], of.size, math.inf), [], gsize)
        both = zip((gthreshold * of.base, gbase - gsize), self.adaptive.as_arrays, strict=True)
        others = [xp.sum(one) for one, came in both if came]
        return [*gxs, *gws, *(xp.astype(one, to.dtype) for one, to in zip(others, given, strict=True))], 0.0

    @property
    def _of_parameter(self) -> ClipRule:
        return replace(self.rule, nonfinite=PROPAGATE)

    def _threshold(self, xp: ModuleType, w: Array, like: Array, given: Sequence[Array]) -> "_Threshold":
        size = self._size(xp, w, like)
        settings = self.adaptive.settings(given)
        clipping, eps = [xp.astype(xp.zeros_like(size) + one, size.dtype) for one in settings]
        above, infinite = size > eps, clipping == math.inf
        base = xp.where(above, size, xp.minimum(eps, xp.zeros_like(eps) + xp.finfo(eps.dtype).max))
        slope = xp.where(infinite, xp.zeros_like(clipping), clipping)
        return _Threshold(size, above, base, slope, xp.where(infinite, clipping, slope * base))

    def _size(self, xp: ModuleType, w: Array, like: Array) -> Array:
        """Return the norms of the units of w, in the precision of their dtype."""
        axes, p = self.rule.scope.shared_axes(w.ndim), self.rule.order.p
        if 0 in w.shape:
            return xp.zeros_like(like)
        magnitudes = xp.astype(xp.abs(w), like.dtype)
        if self.rule.order.extreme:
            if p > 0:
                return self._largest(xp.max(magnitudes, axis=axes))
            return -self._largest(-xp.min(magnitudes, axis=axes))
        largest = self._largest(xp.max(magnitudes, axis=axes))
        some = largest > 0
        unit = xp.where(some, largest, xp.ones_like(largest))
        total = self.rule.total([xp.sum((magnitudes / self.rule.scope.over(unit, w)) ** p, axis=axes)])
        return xp.where(some, unit * xp.where(some, total, xp.ones_like(total)) ** (1.0 / p), xp.zeros_like(total))

    def _largest(self, norms: Array) -> Array:
        return norms if self.axes is None else self.axes.largest([norms])


class _Threshold(NamedTuple):
    """The norms of units, whether they exceed eps, the larger of both, its factor, and the threshold."""

    size: Array
    above: Array
    base: Array
    slope: Array
    threshold: Array
