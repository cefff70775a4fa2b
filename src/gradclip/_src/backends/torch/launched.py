"""Tensors that the kernels for GPUs read: calls that take three launches, and the kernels for all other calls."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradclip._src.backends.torch.launches import (
    BLANK,
    KEEP,
    NEAREST,
    NEAREST_BUT_FLOAT16,
    ORDERS,
    LaunchTable,
    TensorDescriptors,
    can_launch,
    described,
    table_of,
)
from gradclip._src.backends.torch.multi_tensor import MultiTensor
from gradclip._src.backends.torch.tensors import sent
from gradclip._src.core.formats import dtype_name
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.core.rules import Seen

if TYPE_CHECKING:
    from gradclip._src.core.arrays import Arrays
    from gradclip._src.core.rules import OneFactor


# Thresholds that the kernels read.
_READ = (torch.float32, torch.float64)


class TorchOnDevice(NamedTuple):
    """Plain tensors of one device. Their norms are measured, decided and applied there, and nothing waits.

    What is not possible in this way, the methods leave as it is, and return None.
    """

    leaves: Sequence[torch.Tensor]
    found: TensorDescriptors

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> TorchOnDevice | None:
        """Describe plain tensors; None if the kernels cannot read all of them."""
        found = described(leaves) if can_launch(leaves[0].device) else None
        return None if found is None else cls(leaves, found)

    def apart(self) -> bool:
        return self.found.apart

    def threshold(self, max_norm: Any) -> Any:
        """Return a threshold as the kernels take it, if it is a scalar without a derivative on this device."""
        if type(max_norm) is not torch.Tensor or max_norm.device != self.found.device or max_norm.ndim:
            return None
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(max_norm)
        if wrapped or max_norm.requires_grad or max_norm.is_neg() or max_norm._is_zerotensor():
            return None
        return max_norm if max_norm.dtype in _READ else None

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
        self, max_norm: Any, order: Order, policy: Nonfinite, *, each: bool, skip_above: float | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Seen | None] | None:
        """Clip the tensors in place; return their norm, that of each in float64 if asked, and what the norm shows."""
        if order.p not in ORDERS or policy.raises or policy.zeroes:
            return None
        table, addresses, device = _table_of_each(self.found), self.found.addresses, self.found.device
        shown = None if skip_above is None else torch.empty(3, dtype=torch.int8, device=device)
        table.measure(addresses, order)
        norms = table.decide(0.0, order, dtype=torch.float64) if each else None
        times = 1.0 if skip_above is None else skip_above
        norm = table.decide(max_norm, order, skip=policy.blanks, whole=True, shown=shown, times=times)[0]
        table.scale(addresses, whole=True)
        torch.autograd.graph.increment_version(self.leaves)
        if shown is None:
            return norm, norms, None
        finite, above, spike = shown.view(torch.bool).unbind()
        return norm, norms, Seen(finite, above, spike, final=True)

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


def _table_of_each(found: TensorDescriptors) -> LaunchTable:
    return table_of(found, range(len(found.counts)), len(found.counts))


class Launched(MultiTensor):
    """Tensors of one device that share launches, for calls with steps of their own between the kernels."""

    found: TensorDescriptors

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
        results = list(map(torch.empty_like, arrays))
        self._scale(arrays, by, [x.data_ptr() for x in results])
        return results

    def multiply(self, arrays: Arrays, new: Arrays, by: OneFactor) -> None:
        """Multiply the tensors in place, from the values in `new`."""
        if any(map(is_not, arrays, new)):
            super().multiply(arrays, new, by)
            return
        self._scale(arrays, by)
        torch.autograd.graph.increment_version(list(arrays))

    def _scale(self, arrays: Arrays, by: OneFactor, targets: Sequence[int] | None = None) -> None:
        factors, rounding = self._factors(arrays, by), NEAREST if by.steps is None else NEAREST_BUT_FLOAT16
        table = _table_of_each(self.found)
        table.scale(self.found.addresses, targets, factors=factors, rounding=rounding, whole=len(factors) == 1)

    def _factors(self, arrays: Arrays, by: OneFactor) -> torch.Tensor:
        """Return the two factors of all tensors, or of each."""
        given = {name: sent(values, self.found.device) for name, values in by.factors.items()}
        alive = None if by.alive is None else sent(by.alive, self.found.device)
        if by.sizes is None and len(given) == 1:
            first = next(iter(given.values())).reshape(1)
        elif by.sizes is None:
            first = torch.stack([given[dtype_name(x)] for x in arrays])
        else:
            layer_of = [layer for layer, size in enumerate(by.sizes) for _ in range(size)]
            entries = {name: values.unbind() for name, values in given.items()}
            first = torch.stack([entries[dtype_name(x)][layer] for x, layer in zip(arrays, layer_of, strict=True)])
            alive = None if alive is None else torch.stack([alive.unbind()[layer] for layer in layer_of])
        second = torch.where(first == 1.0, KEEP, 1.0)
        return torch.stack([first, second if alive is None else torch.where(alive, second, BLANK)], -1)
