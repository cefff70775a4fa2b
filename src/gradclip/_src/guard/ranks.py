"""Compare the norms of processes that hold the same parameters, without waiting for any of them.

Each process writes what it got to the store through which the processes found each other. All but the first read
what the first has written, and write there if it differs. Nobody waits, so that a process that skips a step, ends or
has no guard stops no other. What is found is told some steps later.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KEPT = 4
"""So many looks of each process stay in the store."""

_MADE: Counter[int] = Counter()
"""How many guards this process has made for parameters of some shapes: so a guard finds its fellows."""


class Ranks:
    """The processes of a group, from the default store."""

    def __init__(self, group: "ProcessGroup | None", parameters: Sequence[Any]) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._store = c10d._get_default_store()
        ranks = c10d.get_process_group_ranks(group or c10d._get_default_group())
        self._rank, self._first = c10d.get_rank(), ranks[0]
        shapes = _shapes(parameters)
        self._name = f"gradclip/guard/{shapes}/{_MADE[shapes]}/{'-'.join(map(str, ranks[:3]))}/{len(ranks)}"
        _MADE[shapes] += 1
        self._own: dict[str, list[Any]] = {}
        self._replicas = False
        self.open = False

    def publish(self, step: int, parameters: Sequence[Any], witnesses: Sequence[Any], norm: float) -> None:
        """Write what this process got at a step: the norm, and of some gradients what a clipped norm does not hide."""
        self._own[str(step)] = [_shapes(parameters), _length(parameters), [norm, *_marks(witnesses)]]
        self._own = dict(list(self._own.items())[-_KEPT:])
        self._store.set(f"{self._name}/{self._rank}", json.dumps(self._own))
        self.open = True

    def differing(self) -> str:
        """Return what differs from another process, in words; "" if nothing is known to differ."""
        if self._rank == self._first:
            said = self._read("differs")
            return "" if said is None else str(said)
        theirs = self._read(str(self._first)) or {}
        for step in [step for step in self._own if step in theirs]:
            (shapes, length, own), (their_shapes, their_length, their) = self._own.pop(step), theirs[step]
            self.open = bool(self._own)
            if shapes != their_shapes:
                continue
            self._replicas = self._replicas or _close(length, their_length, 1e-6)
            if self._replicas and not _same(own, their):
                said = (
                    f"at step {step}, rank {self._rank} got other gradients than rank {self._first}, although both "
                    f"hold the same parameters: their norms are {own[0]:.6g} and {their[0]:.6g}."
                )
                self._store.set(f"{self._name}/differs", json.dumps(said))
                return said
        return ""

    def _read(self, key: str) -> Any:
        key = f"{self._name}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _shapes(parameters: Sequence[Any]) -> int:
    """Return a number that stands for the shapes and dtypes of parameters."""
    return zlib.crc32(repr([(tuple(one.shape), str(one.dtype)) for one in parameters]).encode())


@torch.no_grad()
def _length(parameters: Sequence[Any]) -> float:
    """Return the norm of the parameters themselves."""
    wide = [torch.complex128 if one.is_complex() else torch.float64 for one in parameters]
    norms = [torch.linalg.vector_norm(one.detach(), dtype=dtype) for one, dtype in zip(parameters, wide, strict=True)]
    return math.hypot(*torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()) if norms else 0.0


@torch.no_grad()
def _marks(parameters: Sequence[Any]) -> list[float]:
    """Return the norm and the sum of each gradient: by how much sums differ is to be compared with the norm."""
    grads = [one.grad.detach() for one in parameters if one.grad is not None and one.grad.layout is torch.strided]
    grads = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    pairs = [pair for grad in grads for pair in (torch.linalg.vector_norm(grad), grad.sum())]
    return torch.stack([one.to(pairs[0].device, torch.float32) for one in pairs]).tolist() if pairs else []


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Say whether two processes got the same gradients, up to rounding."""
    (norm, *marks), (their_norm, *theirs) = one, other
    if not _close(norm, their_norm, 1e-3) or len(marks) != len(theirs):
        return False
    each = zip(marks[::2], theirs[::2], marks[1::2], theirs[1::2], strict=True)
    return all(_close(a, b, 1e-3) and not abs(c - d) > 1e-2 * abs(a) for a, b, c, d in each)


def _close(one: float, other: float, within: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= within * max(abs(one), abs(other))
