"""What happens to gradients between two steps: backward passes, calls that clip, and other changes, in their order.

A few small gradients are the witnesses: their norms are taken before and after each backward pass accumulates. A call
that scales all gradients scales them too. Norms stay on the device until the step.
"""

import math
import weakref
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradclip._src.step.heard import ClipCall, current_pass

_MOST_EVENTS = 2**12
"""After so many, nothing more is noted of an optimizer that does not step, or said of the calls before its step."""

_MOST, _ELEMENTS = 8, 2**22
"""The number of witnesses, and of the elements of gradients of the last step that are kept until the next pass."""


@dataclass
class Event:
    """Something that happened, and the norms of the witnesses then: "step", "before", "after" or "clip".

    "before" and "after" are those of a backward pass. A norm is None where there is no gradient, or none was taken.
    `whole` is the norm of all gradients before a pass. `of_others`: the call has none of the optimizer's parameters.
    Of its parameters, which may be freed, the call has the identities.
    """

    kind: str
    norms: list[Any]
    call: ClipCall | None = None
    whole: Any = None
    of_others: bool = False


@dataclass
class GradientOperation:
    """One thing that happened to the gradients, in plain numbers.

    Attributes:
        kind: "backward"; "clip", a call that was seen; "scaled" or "partly", if all witnesses or only some were scaled
            by one number, unseen.
        fresh: whether a backward pass found no gradients before it.
        call: the call.
        ratio: the number they were scaled by.
        whole: the norm of all gradients after that, if a backward pass came next; else NaN.

    """

    kind: str
    fresh: bool = False
    call: ClipCall | None = None
    ratio: float = 1.0
    whole: float = math.nan


@dataclass
class Window:
    """The time from one step, or from the start, until the next."""

    after_step: bool
    witnesses: Sequence[Any]
    leaves: Sequence[Any] = ()
    held: Sequence[Any] = ()
    events: list[Event] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)
    _pass: int | None = None

    @classmethod
    def opened(cls, parameters: Sequence[Any], *, after_step: bool) -> "Window":
        """Start to watch the gradients of parameters."""
        window = cls(after_step, _witnesses(parameters), [one for one in parameters if one.requires_grad])
        if after_step:
            window.held = [_small(one.grad) for one in window.witnesses]
            window.events.append(Event("step", window._norms()))
        # The first gradient that a pass adds to may be any.
        window._hooks = [one.register_hook(WitnessHook(window)) for one in window.leaves]
        for number, one in enumerate(window.witnesses):
            window._hooks.append(one.register_post_accumulate_grad_hook(WitnessHook(window, number)))
        return window

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.held = ()

    # What happens

    def before(self) -> None:
        """Before a pass accumulates its first gradient, take the norms; those of what the last step used, too."""
        if self._is_new_pass():
            self._look(self._norms())

    def after(self, number: int) -> None:
        """Take the norm after a pass has accumulated a gradient."""
        if self._is_new_pass():  # FSDP2 accumulates itself, and calls only this hook
            self._look([None if n == number else norm for n, norm in enumerate(self._norms())])
        if self.events[-1].kind != "after":
            self.events.append(Event("after", [None] * len(self.witnesses)))
        self.events[-1].norms[number] = _norm(self.witnesses[number].grad)

    @property
    def full(self) -> bool:
        """Whether it may lack what happened last."""
        return len(self.events) > _MOST_EVENTS

    def _is_new_pass(self) -> bool:
        if self.full:
            self.close()
        before, self._pass = self._pass, current_pass()
        return self._pass != before

    def _look(self, norms: list[Any]) -> None:
        if any(one is not None for one in self.held):
            self.events.append(Event("left", list(map(_norm, self.held))))
        self.held = ()
        self.events.append(Event("before", norms, whole=_whole([one.grad for one in self.leaves])))

    def clipped(self, call: ClipCall, mine: Set[int]) -> None:
        """Note a call. Within a backward pass there may be one for each parameter, so no norms are taken then.

        Of calls in a row without any of the optimizer's parameters, `mine`, the last is noted: somebody else trains
        another model, and may free it.
        """
        if self.full:
            return
        norms = [None] * len(self.witnesses) if call.in_backward else self._norms()
        given = call.parameters
        others = given is not None and not any(id(one) in mine for one in given)
        noted = replace(call, parameters=None if given is None else array("Q", map(id, given)))
        last = self.events[-1] if others and self.events else None
        if last is not None and last.of_others and last.call is not None and bool(call.count) is bool(last.call.count):
            self.events.pop()
            norms = [old if new is None else new for old, new in zip(last.norms, norms, strict=True)]
        self.events.append(Event("clip", norms, noted, of_others=others))

    def steps(self, parameters: Sequence[Any]) -> list[GradientOperation]:
        """Return what has happened, and which of the parameters calls got; nothing if that is not known to the end.

        This waits for the device.
        """
        if self.full:
            return []
        self.events.append(Event("end", self._norms()))
        rows = fetched([[*event.norms, event.whole] for event in self.events])
        return read(self.events, [row[:-1] for row in rows], [row[-1] for row in rows], parameters)

    def _norms(self) -> list[Any]:
        return [_norm(one.grad) for one in self.witnesses]


class WitnessHook:
    """A hook of a witness. It changes nothing, so others need not come before it, and files leave it out."""

    only_watches = True
    __torch_unserializable__ = True

    def __init__(self, window: Window, number: int | None = None) -> None:
        self._window, self._number = weakref.ref(window), number  # nobody frees a parameter that its hook holds

    def __call__(self, _tensor: torch.Tensor) -> None:
        window = self._window()
        if window is None:
            return
        if self._number is None:
            window.before()
        else:
            window.after(self._number)


def _witnesses(parameters: Sequence[Any]) -> list[Any]:
    """Choose parameters with small gradients from all parts of the list."""
    leaves = [one for one in parameters if one.requires_grad and one.is_leaf]
    parts = [leaves[len(leaves) * n // _MOST : len(leaves) * (n + 1) // _MOST] for n in range(_MOST)]
    chosen = [min(part, key=lambda one: one.numel()) for part in parts if part]
    return chosen


def _small(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient if it is small: what is kept until the next pass takes memory."""
    return None if grad is None or grad.numel() > _ELEMENTS // _MOST else grad


@torch.no_grad()
def _norm(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return the norm of a gradient, or of this process's shard, on its device."""
    if grad is None:
        return None
    values = getattr(grad, "_local_tensor", grad).detach()
    if values.layout is not torch.strided:
        values = values._values()
    if not values.is_floating_point() and not values.is_complex():
        return None
    half = values.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(values, dtype=torch.float32 if half else None)


@torch.no_grad()
def _whole(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the norm of all gradients; None for none, and for shards."""
    if any(hasattr(grad, "_local_tensor") for grad in grads):
        return None
    norms = [norm for norm in map(_norm, grads) if norm is not None]
    if not norms:
        return None
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]))


def fetched(rows: Sequence[Sequence[Any]]) -> list[list[float | None]]:
    """Return scalars as numbers, with one wait for each device."""
    found: dict[int, float] = {}
    scalars = [one for row in rows for one in row if one is not None]
    for device in {one.device for one in scalars}:
        there = [one for one in scalars if one.device == device]
        values = torch.stack([one.to(torch.float32) for one in there]).tolist()
        found.update(zip(map(id, there), values, strict=True))
    return [[None if one is None else found[id(one)] for one in row] for row in rows]


def read(
    events: Sequence[Event],
    norms: Sequence[Sequence[float | None]],
    wholes: Sequence[float | None],
    parameters: Sequence[Any] = (),
) -> list[GradientOperation]:
    """Say what happened, from the norms of the witnesses and of all gradients."""
    steps: list[GradientOperation] = []
    known: list[float | None] = [None] * max((len(row) for row in norms), default=0)
    fresh = False
    mine = {id(one): one for one in parameters}
    for event, row, whole in zip(events, norms, wholes, strict=True):
        if event.kind in ("left", "before", "end"):
            steps += _unseen(known, row, math.nan if whole is None else whole)
        if event.kind == "before":
            fresh = not any(row)
        elif event.kind == "after":
            steps.append(GradientOperation("backward", fresh=fresh))
        elif event.call is not None:
            given = event.call.parameters
            own = None if given is None else [mine[number] for number in given if number in mine]
            steps.append(GradientOperation("clip", call=replace(event.call, parameters=own)))
        partly = event.kind in ("after", "clip")
        known = [old if new is None and partly else new for old, new in zip(known, row, strict=True)]
    return steps


def _unseen(before: Sequence[float | None], now: Sequence[float | None], whole: float) -> list[GradientOperation]:
    """Return what was done to the gradients unseen: that needs two norms."""
    both = [(old, new) for old, new in zip(before, now, strict=True) if old and new and math.isfinite(old + new)]
    lower = [ratio for ratio in (new / old for old, new in both) if ratio != 1.0]
    if len(both) < 2 or not lower or max(lower) > 1.0 - 1e-3 or max(lower) > min(lower) * (1.0 + 1e-3):
        return []
    return [GradientOperation("scaled" if len(lower) == len(both) else "partly", ratio=max(lower), whole=whole)]
