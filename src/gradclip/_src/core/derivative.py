"""Derivatives of clipping and of norms, finite everywhere: one rule for forward and reverse mode, in every framework.

With N = ||x||, its direction w = dN/dx and the coefficient k, clipping is y = k*x. Its differential is

    dy = k*dx + (x / scale) * (a*dN + b*dC),  dN = <w, dx>.

If a `rules.Rule` scales the elements, k = numerator / upper, scale = upper, a = -k, and b is 1 if the numerator is
the threshold, else 0. If it keeps them, k = kept and a = 0. Then b = 0 and scale = N if bits are kept (1 for the
smallest magnitude, which others may exceed by any factor), else b = -k and scale = keep_up_to.

At zero, where a norm has no derivative, w is 0, and k is 0 if it would be a quotient by 0. Elements that share an
extreme magnitude share its derivative equally. The rounding that makes the bound hold is not differentiated. Elements
that do not count (examples outside a mask, elements that a policy removes) have the derivative 0, whatever they
contain. In a batch, each example has its own norm, and the sum over examples is differentiated. The rules run in the
dtype of the returned norm and can be differentiated themselves. `total` adds the contributions of the leaves, and of
other holders of the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from gradclip._src.core.layouts import Scope
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.protocols import Axes
from gradclip._src.core.rules import Target
from gradclip._src.core.values import Array


class At(NamedTuple):
    """The point where a derivative is evaluated: the leaves, their norm or norms, the threshold, and the mask."""

    leaves: Sequence[Array]
    norm: Any
    max_norm: Any
    mask: Array | None = None


class _Multiplier(NamedTuple):
    """The coefficient, and the factors of dN and dC in the differential above, at one point."""

    k: Array
    scale: Array
    a: Array
    b: Array


@dataclass(frozen=True)
class ClipRule:
    """How the clipped leaves and the norm change with the leaves and the threshold.

    `max_norm`: the threshold, multiplied by `share`; None if each call passes it. `scope`: which elements share a norm.
    `summed`: the results are sums over examples. `measures`: the results include a norm.
    """

    measures: ClassVar[bool] = True

    order: Order
    max_norm: float | Array | None
    nonfinite: Nonfinite
    target: Target
    scope: Scope
    summed: bool = False
    share: float = 1.0
    total: Callable[[Sequence[Any]], Any] = sum

    def over(self, axes: Axes) -> "ClipRule":
        """Return the rule for arrays that are sharded over mesh axes."""
        return replace(self, total=axes.total)

    def at(self, leaves: Sequence[Array], norm: Array, max_norm: float | Array | None, mask: Array | None) -> At:
        """Return the point of a call; with `max_norm` None, the threshold is the rule's own."""
        return At(leaves, norm, self.max_norm if max_norm is None else max_norm, mask)

    def jvp(
        self, xp: ModuleType, at: At, changes: Sequence[Array], change: float | Array, dtypes: Sequence[Any]
    ) -> tuple[list[Array], Array]:
        """Return the changes of the results, in these dtypes, and of the norm; `change` is the threshold's."""
        counted, norm = self._counted(xp, at)
        xs, dxs = self._wide(xp, at.leaves, norm, counted), self._wide(xp, changes, norm, counted)
        ws = self._directions(xp, xs, norm)
        dnorm = self._inner(xp, ws, dxs) if xs else xp.zeros_like(norm)
        if not dtypes:
            return [], dnorm
        by = self._multiplier(xp, norm, at.max_norm)
        dk = by.a * dnorm + by.b * (change * self.share)
        dys = [
            self._over(by.k, x) * dx + quotient * self._over(dk, x)
            for x, dx, quotient in zip(xs, dxs, self._quotients(xp, xs, ws, by.scale), strict=True)
        ]
        dys = [xp.sum(dy, axis=0) for dy in dys] if self.summed else dys
        return [xp.astype(dy, dtype) for dy, dtype in zip(dys, dtypes, strict=True)], dnorm

    def vjp(self, xp: ModuleType, at: At, gys: Sequence[Array], gnorm: Array) -> tuple[list[Array], Array]:
        """Return the gradients for the leaves and the threshold, given those of the results and the norm.

        If each norm has its own threshold, the gradient for the threshold has one entry per norm.
        """
        counted, norm = self._counted(xp, at)
        xs = self._wide(xp, at.leaves, norm, counted)
        ws = self._directions(xp, xs, norm)
        along, by = gnorm, self._multiplier(xp, norm, at.max_norm)
        gmax = xp.zeros_like(norm)
        if gys:
            gys = [xp.astype(gy, x.dtype) for gy, x in zip(gys, xs, strict=True)]
            inner = self._inner(xp, self._quotients(xp, xs, ws, by.scale), gys)
            along, gmax = gnorm + by.a * inner, by.b * inner * self.share
        gxs = [w * self._beside(xp, along, w) for w in ws]
        if gys:
            gxs = [self._beside(xp, by.k, gx) * gy + gx for gx, gy in zip(gxs, gys, strict=True)]
        gxs = [
            gx if here is None else xp.where(here, gx, xp.zeros_like(gx)) for gx, here in zip(gxs, counted, strict=True)
        ]
        gxs = [xp.astype(gx, x.dtype) for gx, x in zip(gxs, at.leaves, strict=True)]
        return gxs, gmax if getattr(at.max_norm, "ndim", 0) else xp.sum(gmax)

    def _counted(self, xp: ModuleType, at: At) -> tuple[list[Array | None], Array]:
        """Return which elements of each leaf count (None for all), and the norm, with 1 where nothing counts."""
        norm = at.norm
        inside = self.nonfinite.counted(xp, norm, at.mask)
        if inside is not None:
            norm = xp.where(inside, norm, xp.ones_like(norm))
        if self.nonfinite.zeroes:
            masks = [xp.isfinite(x) for x in at.leaves]
            return [m if inside is None else m & self._over(inside, m) for m in masks], norm
        return [None if inside is None else self._over(inside, x) for x in at.leaves], norm

    def _wide(
        self, xp: ModuleType, arrays: Sequence[Array], norm: Array, counted: Sequence[Array | None]
    ) -> list[Array]:
        """Return the arrays in the norm's precision, with 0 for elements that do not count."""
        kept = [
            a if here is None else xp.where(here, a, xp.zeros_like(a)) for a, here in zip(arrays, counted, strict=True)
        ]
        return [xp.astype(a, xp.result_type(a, norm)) for a in kept]

    def _multiplier(self, xp: ModuleType, norm: Array, max_norm: float | Array) -> _Multiplier:
        threshold = xp.astype((xp.zeros_like(norm) + max_norm) * self.share, norm.dtype)
        rule, zero, one = self.target.rule(xp, threshold), xp.zeros_like(norm), xp.ones_like(norm)
        upper = rule.upper(norm)
        above = upper > rule.keep_up_to
        # Divided by 1, large elements of a result that stays may overflow in a sum whose factor is 0.
        kept = _divisor(xp, norm) if self.order.p > 0 else one
        divisor = xp.where(above, upper, kept if self.target.keeps else rule.keep_up_to)
        some = (divisor > 0) & (threshold >= 0)
        scale = xp.where(some, divisor, one)
        # An unused threshold may be infinite, which would spoil the derivative of this rule.
        numerator = xp.where(above, rule.numerator, rule.kept)
        k = xp.where(some, numerator / xp.where(above, scale, one), zero)
        slope = one if self.target.follows else zero
        b = xp.where(above, slope, zero if self.target.keeps else -k)
        return _Multiplier(k, scale, xp.where(above, -k, zero), xp.where(threshold >= 0, b, zero))

    def _quotients(self, xp: ModuleType, xs: Sequence[Array], ws: list[Array], scale: Array) -> list[Array]:
        """Return x / scale: for p = 2 the directions `ws`, if the scale is the norm (or its factor is 0)."""
        if self.order.p == 2 and self.target.keeps:
            return ws
        return [x / self._beside(xp, scale, x) for x in xs]

    def _directions(self, xp: ModuleType, xs: Sequence[Array], norm: Array) -> list[Array]:
        p = self.order.p
        safe = _divisor(xp, norm)
        if p == 2:
            return [x / self._beside(xp, safe, x) for x in xs]
        magnitudes = [xp.abs(x) for x in xs]
        signs = [
            xp.where(m > 0, x, xp.zeros_like(x)) / _real_beside(xp, xp.where(m > 0, m, xp.ones_like(m)), x)
            for x, m in zip(xs, magnitudes, strict=True)
        ]
        if self.order.extreme and xs:
            hits = [xp.astype(hit, norm.dtype) for hit in self._extremes(xp, magnitudes, norm)]
            ties = self.total([xp.sum(hit, axis=self.scope.shared_axes(hit.ndim)) for hit in hits])
            share = 1.0 / xp.where(ties > 0, ties, xp.ones_like(norm))
            shares = [hit * self._over(share, hit) for hit in hits]
            return [sign * _real_beside(xp, mine, sign) for sign, mine in zip(signs, shares, strict=True)]
        if p == 1:
            return signs
        # For p < 2 the power has no derivative at zero. There it uses the power of 1, times a sign of 0.
        powers = [(xp.where(m > 0, m, self._over(safe, m)) / self._over(safe, m)) ** (p - 1) for m in magnitudes]
        return [sign * _real_beside(xp, power, sign) for sign, power in zip(signs, powers, strict=True)]

    def _inner(self, xp: ModuleType, left: Sequence[Array], right: Sequence[Array]) -> Array:
        """Return the inner product of what shares a norm. Each product is summed before the next one is made."""
        return self.total(
            [xp.sum(_product(xp, a, b), axis=self.scope.shared_axes(a.ndim)) for a, b in zip(left, right, strict=True)]
        )

    def _over(self, value: Array, like: Array) -> Array:
        return self.scope.over(value, like)

    def _beside(self, xp: ModuleType, value: Array, like: Array) -> Array:
        return _real_beside(xp, self._over(value, like), like)

    def _extremes(self, xp: ModuleType, magnitudes: Sequence[Array], norm: Array) -> list[Any]:
        """Return which magnitudes equal the norm.

        For complex numbers the norm is rounded differently from the magnitudes here. So magnitudes are compared with
        their own extreme instead.
        """
        reduce = xp.max if self.order.p > 0 else xp.min
        found = [reduce(m, axis=self.scope.shared_axes(m.ndim)) for m in magnitudes if 0 not in m.shape]
        if not found:
            return [m == self._over(norm, m) for m in magnitudes]
        extreme = reduce(xp.stack(found), axis=0)
        if self.total is not sum:  # Another holder may have the extreme.
            extreme = xp.where(xp.abs(extreme - norm) <= 8 * xp.finfo(norm.dtype).eps * norm, extreme, norm)
        return [m == self._over(extreme, m) for m in magnitudes]


@dataclass(frozen=True)
class LayersRule:
    """How clipped leaves and norms change if consecutive groups of leaves, of these sizes, each have their own norm.

    The threshold and its change are one number for all groups, or a vector.
    """

    measures: ClassVar[bool] = True

    rule: ClipRule
    sizes: Sequence[int]

    def over(self, axes: Axes) -> "LayersRule":
        """Return the rule for arrays that are sharded over mesh axes."""
        return replace(self, rule=self.rule.over(axes))

    def at(self, leaves: Sequence[Array], norm: Sequence[Array], max_norm: float | Array | None, mask: None) -> At:
        """Return the point of a call, as `ClipRule.at` does, with one norm for each group."""
        return At(leaves, norm, self.rule.max_norm if max_norm is None else max_norm)

    def jvp(
        self, xp: ModuleType, at: At, changes: Sequence[Array], change: float | Array, dtypes: Sequence[Any]
    ) -> tuple[list[Array], list[Array]]:
        """Return the changes of the results and of the norms."""
        dys, dnorms, start = [], [], 0
        for number, size in enumerate(self.sizes):
            group = slice(start, start := start + size)
            place = At(at.leaves[group], at.norm[number], _entry(at.max_norm, number))
            found, dnorm = self.rule.jvp(xp, place, changes[group], _entry(change, number), dtypes[group])
            dys.extend(found)
            dnorms.append(dnorm)
        return dys, dnorms


def _divisor(xp: ModuleType, norm: Array) -> Array:
    """Return the norm, with 1 in place of 0 and NaN."""
    return xp.where(norm > 0, norm, xp.ones_like(norm))


def _product(xp: ModuleType, a: Array, b: Array) -> Array:
    """Return products of numbers, of complex ones as pairs."""
    if not xp.isdtype(a.dtype, "complex floating"):
        return a * b
    return xp.real(a) * xp.real(b) + xp.imag(a) * xp.imag(b)


def _real_beside(xp: ModuleType, value: Array, like: Array) -> Array:
    """Convert real numbers so that they can multiply a possibly complex array: some frameworks do not mix the two."""
    beside = getattr(xp, "beside", None)
    return value if beside is None else beside(value, like)


def _entry(value: float | Array, number: int) -> float | Array:
    return value if isinstance(value, float | int) or not value.ndim else value[number]


@dataclass(frozen=True)
class ValueRule:
    """How leaves clamped to [-C, C] change: like the leaves if |x| <= C, else like C, with the sign of x."""

    measures: ClassVar[bool] = False

    max_value: float | Array | None

    def at(self, leaves: Sequence[Array], norm: None, max_value: float | Array | None, mask: None) -> At:
        """Return the point of a call, as `ClipRule.at` does."""
        return At(leaves, norm, self.max_value if max_value is None else max_value)

    def jvp(
        self, xp: ModuleType, at: At, changes: Sequence[Array], change: float | Array, dtypes: Sequence[Any]
    ) -> tuple[list[Array], None]:
        """Return the changes of the clamped leaves; there is no norm."""
        dys = []
        for x, dx in zip(at.leaves, changes, strict=True):
            inside, held = self._held(xp, x, at.max_norm)
            dys.append(xp.where(inside, dx, xp.astype(held * change, dx.dtype)))
        return dys, None

    def vjp(self, xp: ModuleType, at: At, gys: Sequence[Array], gnorm: None) -> tuple[list[Array], float | Array]:
        """Return the gradients for the leaves and for C."""
        gxs, gmax = [], 0.0
        for x, gy in zip(at.leaves, gys, strict=True):
            inside, held = self._held(xp, x, at.max_norm)
            gxs.append(xp.where(inside, gy, xp.zeros_like(gy)))
            gmax = gmax + xp.sum(xp.astype(held * gy, xp.result_type(gy.dtype, xp.float32)))
        return gxs, gmax

    def _held(self, xp: ModuleType, x: Array, max_value: float | Array) -> tuple[Array, Array]:
        """Return which elements are unchanged, and how the others change with C: 1, -1, or 0 if C is negative."""
        one, size = xp.ones_like(x), xp.abs(x)
        if not isinstance(max_value, float):
            dtype = xp.result_type(x.dtype, max_value.dtype)
            size, max_value = xp.astype(size, dtype), xp.astype(max_value, dtype)
        limit = xp.zeros_like(size) + max_value
        inside = size <= limit
        return inside, xp.where(inside | (limit < 0), xp.zeros_like(x), xp.where(x > 0, one, -one))
