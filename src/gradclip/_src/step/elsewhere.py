"""Say so if the parameters of a watched optimizer are stepped by another, which nobody clips or looks at.

PyTorch's global hooks see every step. Once registered they stay, since another thread may be going through them; they
do nothing where nobody waits.
"""

import warnings
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradclip._src.step.warned import ClippingWarning, level_of_user
from gradclip._src.step.wrapped import parameters_of

_SAID_AFTER = 100
"""Steps of another optimizer. Two may take turns, and one may go first for a while."""
_SHARDED = "ZeroRedundancyOptimizer"
_waiting: "dict[int, weakref.ref[Elsewhere]]" = {}
_watched: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_registered: list[Any] = []


class Elsewhere:
    """Waits for the first step of an optimizer, and hears until then of the steps of others."""

    def __init__(self, optimizer: Optimizer, function: str) -> None:
        self._optimizer, self._function = weakref.ref(optimizer), function
        self._counts: dict[int, int | None] = {}  # of the steps of others; None for those of which nothing is said
        self._around: Any = None
        number = id(self)
        _waiting[number] = weakref.ref(self, lambda _: _waiting.pop(number, None))
        _watched.add(optimizer)
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_begins))
            _registered.append(register_optimizer_step_post_hook(_has_stepped))

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
        """Wait no more."""
        _waiting.pop(id(self), None)

    def begins(self, other: Optimizer) -> None:
        """Hear that another optimizer begins a step."""
        mine = self._optimizer()
        if mine is None or not any(kind.__name__ == _SHARDED for kind in type(other).__mro__):
            return
        if parameters_of(mine) <= parameters_of(other):
            self._around = weakref.ref(other)

    def has_stepped(self, other: Optimizer) -> None:
        """Hear that another optimizer has stepped."""
        self._around = None
        number = id(other)
        if number not in self._counts:
            self._counts[number] = 0 if self._stands_for(other) else None
        count = self._counts[number]
        if count is None:
            return
        self._counts[number] = count + 1
        if count + 1 == _SAID_AFTER:
            self.stop()
            mine, others = type(self._optimizer()).__name__, type(other).__name__
            warnings.warn(
                f"{self._function} was called for one {mine}, which has not stepped, while one {others} has stepped "
                f"{count + 1} times with the same parameters. Nothing has clipped those steps, or looked at them. Call "
                f"{self._function} for the optimizer that steps.",
                ClippingWarning,
                stacklevel=level_of_user(),
            )

    def _stands_for(self, other: Optimizer) -> bool:
        """Return whether another optimizer has all of the parameters, and is not watched itself."""
        mine = self._optimizer()
        return mine is not None and other not in _watched and parameters_of(mine) <= parameters_of(other)


def _begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _waiting and not torch.compiler.is_compiling():
        for one in _those_who_wait():
            one.begins(optimizer)


def _has_stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _waiting and not torch.compiler.is_compiling():
        for one in _those_who_wait():
            one.has_stepped(optimizer)


def _those_who_wait() -> list[Elsewhere]:
    return [one for found in list(_waiting.values()) if (one := found()) is not None]
