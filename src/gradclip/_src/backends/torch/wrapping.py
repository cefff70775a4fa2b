"""Subclasses of tensors that only wrap: they change no operation, so the contents of their memory are their values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gradclip._src.backends.torch.tensors import PLAIN

_OF_TENSORS = frozenset(dir(torch.Tensor))
_SAY_NOTHING = {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__slots__"}
_SAY_NOTHING |= {"__init__", "__new__", "__repr__", "__str__", "__format__", "__init_subclass__"}
"""Names that a class may define although tensors have them."""


@dataclass(frozen=True)
class Wrapped:
    """Tensors without the subclasses that only wrap them, and the `tensors` as they were."""

    locals: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> "Wrapped | None":
        """Unwrap tensors, or return None if no subclass only wraps."""
        wrapping = {kind for kind in set(map(type, tensors)) - PLAIN if _only_wraps(kind)}
        if not wrapping:
            return None
        return cls([x.as_subclass(torch.Tensor) if type(x) in wrapping else x for x in tensors], tensors)

    def chosen(self, indices: Sequence[int]) -> "Wrapped":
        """Return the tensors at `indices`."""
        return Wrapped([self.locals[i] for i in indices], [self.tensors[i] for i in indices])

    def whole(self, updated: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the new tensors, wrapped as before, when those without their subclasses become `updated`."""
        if updated is self.locals:
            return self.tensors
        every = zip(updated, self.locals, self.tensors, strict=True)
        return [tensor if new is local else new.as_subclass(type(tensor)) for new, local, tensor in every]


@lru_cache(maxsize=64)
def _only_wraps(kind: type) -> bool:
    """Say whether a class is a subclass of tensors that redefines nothing of them."""
    if not issubclass(kind, torch.Tensor):
        return False
    classes = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    own = {name for one in classes if one not in PLAIN for name in vars(one)}
    return not (own & _OF_TENSORS) - _SAY_NOTHING
