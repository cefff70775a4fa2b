"""Warn if somebody else clips the gradients before a step that clips, or steps the parameters of a watched optimizer.

A call that clips comes again at each step, so it is enough to listen until the second step.

Nobody clips or looks at what the steps of another optimizer read. PyTorch's global hooks see every step. Once
registered they stay, since another thread may be going through them; they do nothing where nobody waits.
"""

import math
import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradclip._src.step import heard
from gradclip._src.step.asked import each_threshold
from gradclip._src.step.heard import ClipCall, threshold_of
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


_STEPS = 2
_ONLY_MEASURES = 1e6
"""A threshold from which on a call is made for the norm that it returns."""
_OWN = "max_grad_norm"
"""In the parameter groups of optimizers that clip the global norm in their step, such as LAMB."""

_stepping: "set[ClippedBefore]" = set()
"""Those whose steps are clipping now: other optimizers may have the same parameters."""


def own_thresholds(optimizer: Optimizer) -> list[float]:
    """Return the threshold to which the step of an optimizer clips each group itself; inf for none, as it says by 0."""
    if _OWN not in optimizer.defaults:
        return [math.inf]
    own = [group.get(_OWN) for group in optimizer.param_groups]
    return [float(one) if isinstance(one, int | float) and one > 0 else math.inf for one in own]


def warn_of_own_clipping(optimizer: Optimizer, max_norm: object) -> None:
    """Warn if the steps of an optimizer clip again, to a lower threshold of their own."""
    lowest = min(own_thresholds(optimizer))
    ours = [one for group in optimizer.param_groups for one in each_threshold(group.get("max_norm", max_norm))]
    if lowest == math.inf or all(isinstance(one, int | float) and one <= lowest for one in ours):
        return
    kind = type(optimizer).__name__
    warnings.warn(
        f"{kind} clips its gradients itself, to {lowest:g}: {_OWN!r} in its parameter groups. It does so after this "
        f"clipping, so thresholds above {lowest:g} have no effect. Leave one of the two out. To leave out {kind}'s, "
        f"set group[{_OWN!r}] = math.inf for each group in optimizer.param_groups.",
        ClippingWarning,
        stacklevel=level_of_user(),
    )


class ClippedBefore(heard.Watcher):
    """Listens for calls that clip the gradients of one optimizer by their global norm, until its second step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._heard: ClipCall | None = None
        self._left = _STEPS
        heard.watch(self)

    def begin(self) -> None:
        """Warn of a call since the last step, once. What is heard until `end` is the step's own clipping."""
        _stepping.add(self)
        heard = self._heard
        if heard is None or not self._left:
            return
        self.stop()
        warnings.warn(
            f"{heard.function} has clipped these gradients to {threshold_of(heard):g} before the step clips them, and "
            "the step measures what is left. Leave one of the two out. In a trainer, switch its own clipping off: "
            "max_grad_norm=0.0 in Hugging Face's TrainingArguments, no gradient_clip_val in Lightning, no call of "
            "accelerator.clip_grad_norm_ in accelerate.",
            ClippingWarning,
            stacklevel=level_of_user(),
        )

    def end(self) -> None:
        """Listen again, or no more after enough steps."""
        _stepping.discard(self)
        if self._left:
            self._left -= 1
            if not self._left:
                self.stop()

    def stop(self) -> None:
        """Listen no more."""
        self._left, self._heard = 0, None
        heard.unwatch(self)

    # What it hears of

    def _clipped(self, call: ClipCall) -> None:
        """Hear of a call. With a huge threshold it only measures. One for some of the gradients may be meant."""
        if _stepping or call.norm is None or call.several or not threshold_of(call) < _ONLY_MEASURES:
            return
        theirs = set(map(id, call.parameters or ()))
        if all(id(one) in theirs for group in self._optimizer.param_groups for one in group["params"]):
            self._heard = replace(call, parameters=None)  # its parameters may be freed before the step
