"""Tensors that the kernels for GPUs read: calls that take three launches, and the kernels for all other calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradclip.backends.torch.launches import ORDERS, Described, Table, can_launch, described, table_of
from gradclip.backends.torch.multi_tensor import MultiTensor, ordinary
from gradclip.core.formats import dtype_name
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order

if TYPE_CHECKING:
    from gradclip.core.arrays import Arrays
    from gradclip.core.records import OneFactor


class OnDevice(NamedTuple):
    """Plain tensors of one device. Their norms are measured, decided and applied there, and nothing waits.

    What is not possible in this way, the methods leave as it is, and return None.
    """

    leaves: Sequence[torch.Tensor]
    found: Described

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> OnDevice | None:
        """Describe plain tensors; None if the kernels cannot read all of them."""
        found = described(leaves) if can_launch(leaves[0].device) else None
        return None if found is None else cls(leaves, found)

    def apart(self) -> bool:
        return self.found.apart

    def threshold(self, max_norm: object) -> Any:
        """Return a threshold as the kernels take it, if it is a scalar without a derivative on this device."""
        if type(max_norm) is not torch.Tensor or max_norm.device != self.found.device or max_norm.ndim:
            return None
        return None if max_norm.requires_grad or not max_norm.is_floating_point() else max_norm.to(torch.float64)

    def norm(self, order: Order) -> torch.Tensor | None:
        """Return the norm of all tensors."""
        if order.p not in ORDERS:
            return None
        table = table_of(self.found)
        table.measure(self.found.addresses, order)
        return table.decide(0.0, order)[0]

    def clip_(self, max_norm: Any, order: Order, policy: Nonfinite) -> torch.Tensor | None:
        """Clip the tensors in place; return their norm."""
        norms = self._clip_(None, 1, max_norm, order, policy)
        return None if norms is None else norms[0]

    def clip_watched_(
        self, max_norm: Any, order: Order, policy: Nonfinite, *, each: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Clip the tensors in place; return their norm and, if asked, that of each, before clipping, in float64."""
        if order.p not in ORDERS or policy.raises or policy.zeroes:
            return None
        table, addresses = _table_of_each(self.found), self.found.addresses
        table.measure(addresses, order)
        norms = table.decide(0.0, order, dtype=torch.float64) if each else None
        norm = table.decide(max_norm, order, skip=policy.blanks, whole=True, dtype=torch.float64)[0]
        table.scale(addresses, whole=True)
        torch.autograd.graph.increment_version(self.leaves)
        return norm, norms

    def clip_each_(self, max_norm: Any, order: Order, policy: Nonfinite) -> Sequence[torch.Tensor] | None:
        """Clip each tensor in place by its own norm; return the norms."""
        norms = self._clip_(range(len(self.leaves)), len(self.leaves), max_norm, order, policy)
        return None if norms is None else norms.unbind()

    def clip_parts_(
        self, part_of: Sequence[int], max_norms: Sequence[float], order: Order, policy: Nonfinite
    ) -> torch.Tensor | None:
        """Clip parts in place, each by its own norm; return the norm of all. One that is not finite counts for all."""
        norms = self._clip_(part_of, len(max_norms), max_norms, order, policy, joint=True)
        return None if norms is None else norms[-1]

    def _clip_(
        self,
        part_of: Sequence[int] | None,
        parts: int,
        max_norm: Any,
        order: Order,
        policy: Nonfinite,
        *,
        joint: bool = False,
    ) -> torch.Tensor | None:
        if order.p not in ORDERS or policy.raises:
            return None
        table, addresses = table_of(self.found, part_of, parts), self.found.addresses
        table.measure(addresses, order, zero=policy.zeroes)
        norms = table.decide(max_norm, order, joint=joint, skip=policy.blanks)
        table.scale(addresses, zero=policy.zeroes)
        # The kernels write behind autograd's back. A backward pass that needs the old values then fails.
        torch.autograd.graph.increment_version(self.leaves)
        return norms

    def clipped(self, max_norm: Any, order: Order, policy: Nonfinite) -> tuple[list[torch.Tensor], Any] | None:
        """Return new tensors, clipped, and the norm of all."""
        if order.p not in ORDERS or policy.raises:
            return None
        table, addresses = table_of(self.found), self.found.addresses
        table.measure(addresses, order, zero=policy.zeroes)
        norms = table.decide(max_norm, order, skip=policy.blanks)
        results = list(map(torch.empty_like, self.leaves))
        table.scale(addresses, [x.data_ptr() for x in results], zero=policy.zeroes)
        return results, norms[0]


def _table_of_each(found: Described) -> Table:
    return table_of(found, range(len(found.counts)), len(found.counts))


class Launched(MultiTensor):
    """Tensors of one device that share launches, for calls with steps of their own between the kernels."""

    found: Described

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> MultiTensor | None:
        """Return the tensors for the kernels, else for PyTorch's own multi-tensor operations."""
        grouped = super().of(tensors)
        plain = isinstance(grouped, cls) and set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        found = described(tensors) if plain and can_launch(tensors[0].device) else None
        if not isinstance(grouped, cls) or found is None:
            return MultiTensor.of(tensors)
        grouped.found = found
        return grouped

    def norms(
        self, arrays: Arrays, p: float, device: torch.device, divisor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norms of the tensors as a float64 vector."""
        if divisor is not None or device != self.found.device:
            return super().norms(arrays, p, device, divisor)
        table = _table_of_each(self.found)
        table.measure(self.found.addresses, Order(p))
        return table.decide(0.0, Order(p), dtype=torch.float64)

    def multiplied(self, arrays: Arrays, by: OneFactor) -> list[torch.Tensor]:
        """Return the tensors, multiplied."""
        results, factors = list(map(torch.empty_like, arrays)), self._factors(arrays, by)
        targets = [x.data_ptr() for x in results]
        table = _table_of_each(self.found)
        table.scale(self.found.addresses, targets, factors=factors, whole=len(factors) == 1)
        return results

    def multiply(self, arrays: Arrays, new: Arrays, by: OneFactor) -> None:
        """Multiply the tensors in place, from the values in `new`."""
        if new is not arrays:
            super().multiply(arrays, new, by)
            return
        factors = self._factors(arrays, by)
        _table_of_each(self.found).scale(self.found.addresses, factors=factors, whole=len(factors) == 1)
        torch.autograd.graph.increment_version(list(arrays))

    def _factors(self, arrays: Arrays, by: OneFactor) -> torch.Tensor:
        """Return the two factors of all tensors, or of each. Products are rounded toward zero, so none is stepped."""
        entries = {name: values.unbind() for name, values in by.factors.items()} if by.sizes else {}
        alive = None if by.alive is None else by.alive.unbind() if by.sizes else by.alive
        if not by.sizes and len(by.factors) == 1:
            first = next(iter(by.factors.values())).reshape(1)
        else:
            layer_of = [layer for layer, size in enumerate(by.sizes or ()) for _ in range(size)]
            names = map(dtype_name, arrays)
            first = torch.stack(
                [entries[name][layer_of[i]] if by.sizes else by.factors[name] for i, name in enumerate(names)]
            )
            alive = torch.stack([alive[layer] for layer in layer_of]) if alive is not None and by.sizes else alive
        if alive is not None:
            first = torch.where(alive, first, -1.0)
        return torch.stack([first, torch.ones_like(first)], -1)
