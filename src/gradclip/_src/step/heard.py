"""Tell the guards of optimizers which calls have clipped, and which steps a GradScaler has skipped.

gradclip's own functions announce their calls. Those of PyTorch do not: as long as a guard watches, the names by which
`torch.nn.utils.clip_grad_norm_` reaches the function that scales, and `torch.amp.GradScaler.step`, lead to functions
that call PyTorch's and tell the guards. They are put back when the last guard is removed.

GradScaler where several processes step together: it skips the step only on those whose own gradients overflow.
The others would wait for them, since their steps measure one norm. So a process that is about to skip takes part in
that first. All of them then find that the norm is not finite, skip, and let their GradScalers lower the scale.
"""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from gradclip._src.annotations import Parameters
from gradclip._src.core import announced
from gradclip._src.core.norms import Order
from gradclip._src.inplace.gradients import chosen
from gradclip._src.passed.leaves import Choice
from gradclip._src.passed.parameters import ParameterList, have_thresholds, reusable
from gradclip._src.step.wrapped import unwrapped
from gradclip._src.thresholds.holder import AdaptiveThreshold

_BY_GLOBAL_NORM = ("clip_grad_norm_", "clip_grads_with_norm_")


@dataclass(frozen=True, eq=False)
class ClipCall:
    """A call that has clipped gradients in place.

    Attributes:
        function: its name.
        parameters: the parameters it was given; None if they are unknown.
        count: how many it was given.
        filled: how many of them had a gradient, if a guard will look at the next step.
        max_norm: its threshold, as it was passed.
        norm: the norm before clipping, if it clips by a global norm; else None.
        order: the order of that norm; None if it is unknown.
        nonfinite: its policy.
        in_backward: whether it was made within a backward pass, by a hook.
        several: whether groups or names have thresholds of their own, so that `max_norm` is no bound for `norm`.

    """

    function: str
    parameters: Sequence[Any] | None
    count: int
    filled: int
    max_norm: Any
    norm: Any
    order: float | None = None
    nonfinite: str = "propagate"
    in_backward: bool = False
    several: bool = False


class Watcher:
    """What hears of calls, and of the steps of one optimizer."""

    _optimizer: Any
    _clips = False
    """Whether it clips, or only looks."""

    @property
    def _watching(self) -> bool:
        """Whether it will look at the next step, and asks how many gradients there are."""
        return False

    def _clipped(self, call: ClipCall) -> None:
        """Hear of a call that has clipped."""

    def _stepping(self, scaler: torch.amp.GradScaler, outer: Any) -> None:
        """Hear that a GradScaler is about to step the optimizer, or one `outer` around it."""

    def _stepped(self, scaler: torch.amp.GradScaler, *, failed: bool) -> None:
        """Hear that it has done so, skipped the step, or failed."""


def threshold_of(call: ClipCall) -> float:
    """Return the threshold of a call; NaN if it is not one number."""
    one = isinstance(call.max_norm, AdaptiveThreshold) and call.max_norm._layers is None
    max_norm: Any = call.max_norm.max_norm if one else call.max_norm
    try:
        return float(max_norm)
    except (TypeError, ValueError, RuntimeError):  # the last for a tensor without values
        return math.nan


_watchers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_replaced: list[tuple[Any, str, Any, Any]] = []


def watch(watcher: Watcher) -> None:
    """Tell a watcher of all calls until `unwatch`."""
    _watchers.add(watcher)
    weakref.finalize(watcher, _put_back)
    if _heard not in announced.listeners:
        announced.listeners.append(_heard)
    if not _replaced:
        for owner, name, make in _PLACES:
            original = getattr(owner, name, None)
            if original is None:  # an older PyTorch
                continue
            made = make(original)
            setattr(owner, name, made)
            _replaced.append((owner, name, original, made))


def unwatch(watcher: Watcher) -> None:
    """Tell a watcher no more. After the last one, put PyTorch's own functions back."""
    _watchers.discard(watcher)
    _put_back()
    _stop_listening()


def _stop_listening() -> None:
    if not any(True for _ in _watchers) and _heard in announced.listeners:
        announced.listeners.remove(_heard)


def _put_back() -> None:
    """Put PyTorch's own functions back once nobody watches.

    It may run at any time, when memory is freed: even while a call is compiled, whose code has seen the listeners.
    So they stay, and the next call that is not compiled removes them.
    """
    if any(True for _ in _watchers) or not _replaced:
        return
    for owner, name, original, made in _replaced:
        if getattr(owner, name) is made:  # else somebody has wrapped it since: it stays inside, and tells nobody
            setattr(owner, name, original)
    _replaced.clear()


def _tell(call: ClipCall) -> None:
    for watcher in list(_watchers):
        watcher._clipped(call)


def _heard(call: announced.AnnouncedCall) -> None:
    """Tell of a call of gradclip."""
    if torch.compiler.is_compiling():
        return
    if not _watchers:
        _stop_listening()
        return
    given, norm = call.arguments, None
    if call.function in _BY_GLOBAL_NORM:
        norm = given.get("total_norm", call.result)
    threshold = next((given[name] for name in ("max_norm", "clip_value", "clipping") if name in given), None)
    order = Order.parse(given.get("ord", 2)).p if call.function == "clip_grad_norm_" else None
    parameters = _chosen(given.get("parameters"), given.get("where"))
    made = _call(call.function, parameters, threshold, norm, order, given.get("nonfinite", "propagate"))
    several = norm is not None and (isinstance(threshold, Mapping) or have_thresholds(given.get("parameters")))
    _tell(replace(made, several=several))


def _chosen(parameters: object, where: Any) -> object:
    """Return the parameters that a call chose by name."""
    if where is None:
        return parameters
    params = ParameterList.of(cast("Parameters", parameters), own_thresholds=True)
    return parameters if params.tree is not None else chosen(params, Choice(where), alone=False).parameters


def _call(
    function: str,
    parameters: object,
    max_norm: object,
    norm: object,
    order: float | None = None,
    nonfinite: str = "propagate",
) -> ClipCall:
    listed, filled = _listed(parameters), 1
    if listed is not None and any(one._watching for one in _watchers):  # only then is it asked for
        filled = sum(getattr(one, "grad", None) is not None for one in listed)
    count = 0 if listed is None else len(listed)
    return ClipCall(function, listed, count, filled, max_norm, norm, order, nonfinite, current_pass() != -1)


def _listed(parameters: object) -> Sequence[Any] | None:
    """Return parameters as a list, a tree of arrays as one thing that is none, and None for what cannot be listed."""
    if type(parameters) is list and parameters and isinstance(parameters[0], torch.Tensor):
        return parameters
    try:
        found = ParameterList.of(cast("Parameters", parameters), own_thresholds=True)
    except Exception:
        return None
    return (found.tree,) if found.tree is not None else found.parameters


def current_pass() -> int:
    """Return the number of the backward pass that is running in this thread; -1 if none is."""
    return torch._C._current_graph_task_id()


# PyTorch's functions, told of


def _scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _clip_grads_with_norm_(
        parameters: Parameters, max_norm: object, total_norm: object, *args: object, **kwargs: object
    ) -> Any:
        if torch.compiler.is_compiling() or not _watchers:
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        parameters = reusable(parameters)
        result = original(parameters, max_norm, total_norm, *args, **kwargs)
        _tell(_call("clip_grad_norm_", parameters, max_norm, total_norm))
        return result

    return _clip_grads_with_norm_


def _clamping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_value_(parameters: Parameters, clip_value: object, *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling() or not _watchers:
            return original(parameters, clip_value, *args, **kwargs)
        parameters = reusable(parameters)
        result = original(parameters, clip_value, *args, **kwargs)
        _tell(_call("clip_grad_value_", parameters, clip_value, None))
        return result

    return clip_grad_value_


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: torch.amp.GradScaler, optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
        mine = _watching(optimizer) if self.is_enabled() else ()
        failed = True
        try:
            for watcher in mine:
                watcher._stepping(self, optimizer)
            result = original(self, optimizer, *args, **kwargs)
            failed = False
        finally:
            for watcher in mine:
                watcher._stepped(self, failed=failed)
        return result

    return step


def _watching(optimizer: Any) -> list[Any]:
    """Return who watches the steps of an optimizer, or of the one it steps, in the same order on all processes."""
    try:
        inner = unwrapped(optimizer)
    except TypeError:
        inner = optimizer
    mine = (one for one in _watchers if one._optimizer is optimizer or one._optimizer is inner)
    return sorted(mine, key=lambda one: one._clips)


_PLACES: Sequence[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = (
    (clip_grad, "_clip_grads_with_norm_", _scaling),
    (utils, "clip_grads_with_norm_", _scaling),
    (clip_grad, "clip_grad_value_", _clamping),
    (utils, "clip_grad_value_", _clamping),
    (torch.amp.GradScaler, "step", _stepping),
)


class ScaledSteps(Watcher):
    """Hears of the steps that a GradScaler makes for one optimizer, until `stop`.

    Attributes:
        scaler: the GradScaler that makes the present step; None if there is none.

    """

    _clips = True  # guards hear of a step before: on all processes they exchange first what overflows

    def __init__(self, optimizer: Optimizer, unscale: Callable[[Callable[[], None]], None], skip: Any) -> None:
        """Listen. `unscale` gets what unscales and may raise, `skip` takes part in a step that is skipped here."""
        self._optimizer = optimizer
        self.scaler: Any = None
        self._outer: Any = optimizer
        self._unscale, self._skip = unscale, skip
        watch(self)

    def stop(self) -> None:
        """Listen no more."""
        unwatch(self)

    def overflowed(self, anywhere: torch.Tensor) -> None:
        """Let the GradScaler lower its scale if gradients overflowed anywhere: then the scalar is 1."""
        if self.scaler is None:
            return
        by_device = self.scaler._per_optimizer_states[id(self._outer)]["found_inf_per_device"]
        if not by_device:  # this process has no gradients
            by_device[anywhere.device] = torch.zeros_like(anywhere)
        for found in by_device.values():
            found.copy_(torch.maximum(found, anywhere.to(found)))

    def found(self) -> torch.Tensor | None:
        """Return a scalar that is not 0 if the GradScaler has found an overflow here; None if there is none."""
        first, *others = self._infinities() or [None]
        return first if first is None else sum((one.to(first) for one in others), start=first)

    def _infinities(self) -> list[torch.Tensor]:
        return [] if self.scaler is None else infinities(self.scaler, self._outer)

    # What it hears of

    def _stepping(self, scaler: torch.amp.GradScaler, outer: Any) -> None:
        """Hear that a GradScaler is about to step the optimizer, or one `outer` around it, or to skip the step."""
        self.scaler, self._outer = scaler, outer
        if getattr(outer, "_step_supports_amp_scaling", False):
            return  # it makes all steps
        self._unscale(lambda: unscaled(scaler, outer))
        if any(found.item() for found in infinities(scaler, outer)):
            self._skip()

    def _stepped(self, scaler: torch.amp.GradScaler, *, failed: bool) -> None:
        """Hear that it has done so, or failed."""
        self.scaler = None


def unscaled(scaler: Any, optimizer: Optimizer) -> None:
    """Let a GradScaler unscale the gradients, as its step does, if nobody has called it before."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    if not infinities(scaler, optimizer):
        raise AssertionError("No inf checks were recorded for this optimizer.")  # as the step raises


def infinities(scaler: Any, optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the scalars, one for each device, that are 1.0 where a GradScaler has found gradients not finite."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
