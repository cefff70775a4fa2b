"""Compare the norms of processes that hold the same parameters, without waiting for any of them.

Each process writes what it got to the store through which the processes found each other. All but the first read
what the first has written, and write there if it differs. Nobody waits, so that a process that skips a step, ends or
has no guard stops no other. What is found is told some steps later.
"""

import itertools
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

_KEPT = 4
"""So many looks of each process stay in the store."""

_NUMBERS = itertools.count()


class Ranks:
    """The processes of a group, from the default store."""

    def __init__(self, group: Any) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._store = c10d._get_default_store()
        ranks = c10d.get_process_group_ranks(group or c10d._get_default_group())
        self._rank, self._first = c10d.get_rank(), ranks[0]
        self._name = f"gradclip/guard/{next(_NUMBERS)}/{'-'.join(map(str, ranks[:3]))}/{len(ranks)}"
        self._own: dict[str, list[Any]] = {}
        self._replicas = False
        self.open = False

    def publish(self, step: int, parameters: Sequence[Any], norm: float) -> None:
        """Write what this process got at a step."""
        shapes = zlib.crc32(repr([(tuple(p.shape), str(p.dtype)) for p in parameters]).encode())
        self._own[str(step)] = [shapes, _length(parameters), norm]
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
            (shapes, length, norm), (their_shapes, their_length, their_norm) = self._own.pop(step), theirs[step]
            self.open = bool(self._own)
            if shapes != their_shapes:
                continue
            self._replicas = self._replicas or _close(length, their_length, 1e-6)
            if self._replicas and not _close(norm, their_norm, 1e-3):
                said = (
                    f"at step {step} the optimizer got the norm {norm:.6g} on rank {self._rank} and {their_norm:.6g} "
                    f"on rank {self._first}, although both hold the same parameters."
                )
                self._store.set(f"{self._name}/differs", json.dumps(said))
                return said
        return ""

    def _read(self, key: str) -> Any:
        key = f"{self._name}/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


@torch.no_grad()
def _length(parameters: Sequence[Any]) -> float:
    """Return the norm of the parameters themselves."""
    wide = [torch.complex128 if one.is_complex() else torch.float64 for one in parameters]
    norms = [torch.linalg.vector_norm(one.detach(), dtype=dtype) for one, dtype in zip(parameters, wide, strict=True)]
    return math.hypot(*torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()) if norms else 0.0


def _close(one: float, other: float, within: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= within * max(abs(one), abs(other))
