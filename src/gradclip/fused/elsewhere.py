"""Say so if the parameters of a watched optimizer are stepped by another, which nobody clips or looks at.

PyTorch's global hooks see every step. They are there only as long as an optimizer that is watched has not stepped.
"""

import warnings
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradclip.fused.guard_words import ClippingWarning, level_of_user
from gradclip.fused.wrapped import parameters_of

_SAID_AFTER = 2
"""Steps of another optimizer. One alone may be the first of two that take turns."""
_SHARDED = "ZeroRedundancyOptimizer"
_waiting: "weakref.WeakSet[Elsewhere]" = weakref.WeakSet()
_hooks: list[Any] = []


class Elsewhere:
    """Waits for the first step of an optimizer, and hears until then of the steps of others."""

    def __init__(self, optimizer: Optimizer, function: str) -> None:
        self._optimizer, self._function = weakref.ref(optimizer), function
        self._others: dict[int, int] = {}
        self._around: Any = None
        _waiting.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_begins))
            _hooks.append(register_optimizer_step_post_hook(_has_stepped))

    def arrived(self) -> None:
        """Note that the optimizer steps. Raise a ValueError if it is one process's share of a sharded one."""
        around, mine = self._around and self._around(), self._optimizer()
        if around is not None and mine is not None and len(parameters_of(mine)) < len(parameters_of(around)):
            raise ValueError(
                f"this {type(mine).__name__} is the part of a {_SHARDED} that this process steps, and its norm is not "
                f"that of all gradients. Call {self._function} for the {_SHARDED} itself."
            )
        self.stop()

    def stop(self) -> None:
        """Wait no more. The last one removes the hooks; not at the end of a step, whose hooks PyTorch goes through."""
        _waiting.discard(self)
        if not _waiting:
            while _hooks:
                _hooks.pop().remove()

    def begins(self, other: Optimizer) -> None:
        """Hear that another optimizer begins a step."""
        if any(kind.__name__ == _SHARDED for kind in type(other).__mro__) and self._shares(other):
            self._around = weakref.ref(other)

    def has_stepped(self, other: Optimizer) -> None:
        """Hear that another optimizer has stepped."""
        self._around = None
        if not self._shares(other):
            return
        count = self._others[id(other)] = self._others.get(id(other), 0) + 1
        if count == _SAID_AFTER:
            _waiting.discard(self)
            warnings.warn(
                f"{self._function} was called for {_named(self._optimizer())}, which has not stepped, while "
                f"{_named(other)} has stepped {count} times with parameters of it. Those steps are not seen. Call "
                f"{self._function} for the optimizer that steps.",
                ClippingWarning,
                stacklevel=level_of_user(),
            )

    def _shares(self, other: Optimizer) -> bool:
        mine = self._optimizer()
        return mine is not None and mine is not other and not parameters_of(mine).isdisjoint(parameters_of(other))


def _named(optimizer: Any) -> str:
    return f"one {type(optimizer).__name__}"


def _begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for one in tuple(_waiting):
            one.begins(optimizer)


def _has_stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        for one in tuple(_waiting):
            one.has_stepped(optimizer)
