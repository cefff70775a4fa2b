"""Derivatives of clipping and of norms, finite everywhere.

With N = ||x||, its direction w = dN/dx and k = min(1, C / N), clipping is y = k*x. Where N > C its differential is
dy = k*dx + (x / N) * (dC - k*dN), dN = <w, dx>; elsewhere dy = dx. With the result divided by C, k is 1 / max(N, C).
At zero, where a norm has no derivative, w is 0. Elements
that share an extreme magnitude share its derivative equally. The rounding that makes the bound hold is
not differentiated. These rules run in the dtype of the returned norm. `total` adds up what the leaves know, and others
who hold parts of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradclip.norms import Order

Array = Any


@dataclass(frozen=True)
class ClipRule:
    """How the clipped leaves and the norm change with the leaves and the threshold."""

    order: Order
    max_norm: Any
    nonfinite: str
    to_unit: bool = False
    total: Callable[[Sequence[Array]], Array] = sum

    def jvp(
        self, xp: Any, leaves: Sequence[Array], changes: Sequence[Array], norm: Array, change: Any
    ) -> tuple[list[Array], Array]:
        """Return the changes of the clipped leaves and of the norm; `change` is that of the threshold."""
        xs, dxs = self._counted(xp, leaves, norm), self._counted(xp, changes, norm, leaves)
        norm, finite = self._settled(xp, norm)
        dnorm = self.total(_inner(xp, self._directions(xp, xs, norm), dxs))
        clipped, safe, k = self._multiplier(xp, norm)
        dk = xp.where(clipped, change - k * dnorm, 0.0)
        if self.to_unit:
            dk = -k * xp.where(clipped, dnorm, change)
        dys = [k * dx + (x / safe) * dk for x, dx in zip(xs, dxs, strict=True)]
        dys = [xp.where(finite, dy, xp.zeros_like(dy)) for dy in dys]
        return [xp.astype(dy, x.dtype) for dy, x in zip(dys, leaves, strict=True)], dnorm

    def vjp(self, xp: Any, leaves: Sequence[Array], norm: Array, gys: Sequence[Array], gnorm: Array) -> list[Array]:
        """Return the gradients with respect to the leaves, given those of the clipped leaves and the norm."""
        xs, wide_gys = self._counted(xp, leaves, norm), self._counted(xp, gys, norm)
        norm, finite = self._settled(xp, norm)
        clipped, safe, k = self._multiplier(xp, norm)
        inner = self.total(_inner(xp, [x / safe for x in xs], wide_gys))
        along = gnorm - xp.where(clipped, k * inner, 0.0)
        directions = self._directions(xp, xs, norm)
        gxs = [k * gy + w * along for gy, w in zip(wide_gys, directions, strict=True)]
        gxs = [xp.where(finite, gx, xp.zeros_like(gx)) for gx in gxs]
        return [xp.astype(gx, x.dtype) for gx, x in zip(gxs, leaves, strict=True)]

    def _counted(self, xp: Any, arrays: Sequence[Array], norm: Array, where: Sequence[Array] = ()) -> list[Array]:
        """Return the arrays in the norm's precision, 0 where an element does not count."""
        if self.nonfinite in ("zero", "skip"):
            masks = [xp.isfinite(x) for x in (where or arrays)]
            arrays = [xp.where(m, a, xp.zeros_like(a)) for m, a in zip(masks, arrays, strict=True)]
        return [xp.astype(a, xp.result_type(a, norm)) for a in arrays]

    def _settled(self, xp: Any, norm: Array) -> tuple[Array, Array]:
        """Return the norm, 1 where it is skipped, and whether it is not."""
        finite = xp.isfinite(norm) if self.nonfinite == "skip" else xp.isfinite(xp.zeros_like(norm))
        return xp.where(finite, norm, xp.ones_like(norm)), finite

    def _multiplier(self, xp: Any, norm: Array) -> tuple[Array, Array, Array]:
        clipped = norm > self.max_norm
        if self.to_unit:
            largest = xp.where(clipped, norm, self.max_norm)
            safe = xp.where(largest > 0, largest, xp.ones_like(norm))
            return clipped, safe, 1.0 / safe
        safe = xp.where(clipped, norm, xp.ones_like(norm))
        return clipped, safe, xp.where(clipped, self.max_norm / safe, 1.0)

    def _directions(self, xp: Any, xs: Sequence[Array], norm: Array) -> list[Array]:
        p = self.order.p
        safe = xp.where(norm > 0, norm, xp.ones_like(norm))
        if p == 2:
            return [x / safe for x in xs]
        magnitudes = [xp.abs(x) for x in xs]
        signs = [x / xp.where(m > 0, m, xp.ones_like(m)) for x, m in zip(xs, magnitudes, strict=True)]
        if self.order.extreme:
            hits = [xp.astype(hit, norm.dtype) for hit in self._extremes(xp, magnitudes, norm)]
            ties = self.total([xp.sum(hit) for hit in hits])
            share = 1.0 / xp.where(ties > 0, ties, xp.ones_like(norm))
            return [sign * (hit * share) for sign, hit in zip(signs, hits, strict=True)]
        return [s * (m / safe) ** (p - 1) for s, m in zip(signs, magnitudes, strict=True)]

    def _extremes(self, xp: Any, magnitudes: Sequence[Array], norm: Array) -> list[Array]:
        """Say which magnitudes are the norm.

        The norm of complex numbers is rounded in another way than their magnitudes here: the extreme of these counts.
        """
        reduce = xp.max if self.order.p > 0 else xp.min
        found = [reduce(m) for m in magnitudes if 0 not in m.shape]
        if not found:
            return [m == norm for m in magnitudes]
        extreme = reduce(xp.stack(found))
        if self.total is not sum:  # Others may hold it.
            extreme = xp.where(xp.abs(extreme - norm) <= 8 * xp.finfo(norm.dtype).eps * norm, extreme, norm)
        return [m == extreme for m in magnitudes]


def _inner(xp: Any, left: Sequence[Array], right: Sequence[Array]) -> list[Array]:
    products = [
        xp.real(xp.conj(a) * b) if xp.isdtype(a.dtype, "complex floating") else a * b
        for a, b in zip(left, right, strict=True)
    ]
    return [xp.sum(product) for product in products]
