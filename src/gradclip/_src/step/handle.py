"""What clipping at an optimizer's steps has in common: who clips which optimizer and follows its norms, and saving."""

import copy
import gc
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from gradclip._src.annotations import NamedThresholds, Policy, Scalar, Threshold
from gradclip._src.backends.torch.tensors import without_values
from gradclip._src.core.pipeline import EachNorm
from gradclip._src.distributed.processes import ONE_PROCESS, processes_of, telling
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.passed.parameters import FOLLOWS, ParameterList, have_thresholds, may_lack_gradients
from gradclip._src.public import record
from gradclip._src.step.asked import Scope, each_threshold
from gradclip._src.step.attached import Attached, as_passed, many
from gradclip._src.step.heard import ScaledSteps
from gradclip._src.step.others import ClippedBefore, Elsewhere
from gradclip._src.step.within import Request, makes_state
from gradclip._src.step.wrapped import Closure, groups_of, parameters_of, put_runner_last, with_closure
from gradclip._src.thresholds.holder import AdaptiveThreshold


class Holder(Protocol):
    """The clipping at the steps of an optimizer, or by an engine."""

    def _follows(self, given: object) -> bool:
        """Return whether it clips, and records the norms in what is given."""

    def _clips(self) -> Set[int]:
        """Return the identities of the parameters whose gradients it clips, as far as they are known."""


_holders: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def check_free(given: object, parameters: Set[int] = frozenset(), holder: Holder | None = None) -> None:
    """Raise a ValueError if an `AdaptiveThreshold` or a `Monitor` follows the optimizer of another holder.

    An optimizer made anew for some of the same parameters may take it over.
    """
    if _other(given, parameters, holder) is None:
        return
    gc.collect()  # an optimizer and what clips it hold each other
    if _other(given, parameters, holder) is not None:
        raise ValueError(
            f"this {type(given).__name__} already follows another optimizer. Pass each optimizer its own, or first "
            "call remove() of the handle that clips the other."
        )


def claim(given: object, holder: Holder) -> None:
    """Note which holder has an `AdaptiveThreshold` or a `Monitor`."""
    if isinstance(given, AdaptiveThreshold | Monitor):
        _holders[given] = weakref.ref(holder)


def take(given: AdaptiveThreshold, holder: Holder) -> None:
    """Claim an `AdaptiveThreshold` that a holder's parameter group may have got since. Raises as `check_free` does."""
    found = _holders.get(given)
    if found is None or found() is not holder:
        check_free(given, holder._clips(), holder)
        claim(given, holder)


def _other(given: object, parameters: Set[int], holder: Holder | None) -> Holder | None:
    found = _holders[given]() if isinstance(given, AdaptiveThreshold | Monitor) and given in _holders else None
    if found is None or found is holder or not found._follows(given):
        return None
    return None if parameters & found._clips() else found


class StepPart(NamedTuple):
    """Gradients that share a norm: the norm before clipping, the threshold, and above which multiple of it they skip.

    The threshold is a number, or on an accelerator a scalar tensor. Of layers or units, both may be vectors.
    """

    norm: torch.Tensor
    threshold: float | torch.Tensor
    skip_above: float

    @classmethod
    def of(cls, norm: Any, max_norm: object, threshold: Scalar) -> "StepPart":
        """Return what a call with `max_norm` has clipped, to the threshold that it had at this call."""
        skip_above = max_norm.skip_above if isinstance(max_norm, AdaptiveThreshold) else math.inf
        return cls(norm, threshold if isinstance(threshold, torch.Tensor) else float(threshold), skip_above)

    def shown(self, *, blanks: bool) -> tuple[Any, Any]:
        """Return whether the gradients were clipped, and whether they were skipped, as NaN and infinity if `blanks`."""
        norm, threshold = self.norm, self.threshold
        limit = threshold * self.skip_above if self.skip_above < math.inf else math.inf
        known = norm.device.type == "cpu" and not (isinstance(threshold, torch.Tensor) or without_values(norm))
        on_host = known and not norm.ndim
        value: Any = norm.item() if on_host else norm.double() if known else norm
        finite = math.isfinite(value) if on_host else torch.isfinite(value)
        spike = (value > limit) & finite
        clipped = (value > threshold) & (value <= limit) & finite
        return clipped, spike | (finite == 0) if blanks else spike

    def left(self, *, blanks: bool) -> torch.Tensor:
        """Return the norm of what the optimizer got."""
        one = self.norm.new_ones(())
        clipped, skipped = (one * flag > 0 for flag in self.shown(blanks=blanks))
        return torch.where(clipped, one * self.threshold, self.norm).masked_fill(skipped, 0.0)


def left_of_all(parts: Sequence[StepPart], order: float, *, blanks: bool) -> torch.Tensor:
    """Return the norm of what the optimizer got of all parts together."""
    each = [part.left(blanks=blanks) for part in parts]
    if len(each) == 1 and not each[0].ndim:
        return each[0]
    return combined(torch.cat([one.reshape(-1).to(each[0].device) for one in each]), order)


def combined(norms: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norm of all parts from their norms, without overflow."""
    largest = norms.max()
    by = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    wide = torch.float32 if norms.device.type in ("mps", "xla") else torch.float64
    wide = torch.promote_types(norms.dtype, wide)
    return (torch.linalg.vector_norm(norms / by, order, dtype=wide) * by).to(norms.dtype)


class PartsWatched:
    """Stands for a monitor of a call with several thresholds: it keeps the parts, and tells the monitor, if any.

    `common`: groups without a threshold of their own share one, which the call records as its step.
    """

    def __init__(self, monitor: Monitor | None, *, common: bool, parts: list[StepPart] | None = None) -> None:
        self.parts = [] if parts is None else parts
        self._monitor, self._common = monitor, common

    def _of_group(self, name: str) -> "PartsWatched":
        """Return what stands for the monitor of a group."""
        monitor = None if self._monitor is None else self._monitor._of_group(name)
        return PartsWatched(monitor, common=True, parts=self.parts)

    def _watching(self) -> EachNorm | None:
        """Return what takes the norm of each gradient, if the monitor needs it."""
        return None if self._monitor is None else self._monitor._watching()

    def _watched(self, each: EachNorm | None) -> None:
        """Pass on the norms of the gradients."""
        if self._monitor is not None:
            self._monitor._watched(each)

    def _missed(self, each: EachNorm | None) -> None:
        """Pass on the norms of the gradients of a call that raised."""
        if self._monitor is not None:
            self._monitor._missed(each)

    def record(self, norm: Scalar, max_norm: Threshold | AdaptiveThreshold, *, nonfinite: Policy) -> None:
        """Take in what a call has clipped."""
        if self._common:
            threshold = max_norm.max_norm if isinstance(max_norm, AdaptiveThreshold) else max_norm
            self.parts.append(StepPart.of(norm, max_norm, threshold))
        if self._monitor is not None:
            self._monitor.record(norm, max_norm, nonfinite=nonfinite)


_CLIPPED: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_KEY = "gradclip"
"""In an optimizer's state dict: PyTorch reads only "state" and "param_groups", so others can load it too."""
_ABSENT = object()


def check_unclipped(optimizer: Optimizer) -> None:
    """Raise a ValueError if the steps of an optimizer clip already."""
    if optimizer in _CLIPPED:
        raise ValueError(
            "the steps of this optimizer clip already: clip_at_step was already called for it. Assign max_norm of what "
            "it returned, or call its remove() first."
        )


@record
class StepClipping(Attached):
    """Clipping at the steps of one optimizer, until `remove()`.

    Attributes:
        norm: the norm of the unscaled gradients before clipping, at the last step; None before the first step.
        threshold: the threshold of the last step: a number, or on an accelerator a scalar tensor; None before the
            first. Thresholds that parameter groups have of their own are not shown here. Those that an
            `AdaptiveThreshold` sets for each layer are a vector.
        max_norm: the threshold, the `AdaptiveThreshold` that sets it, or both by patterns of names. You may assign a
            new one; it applies from the next step on.
        steps: the number of steps that this object has clipped or left as they are. Steps that got no gradients do not
            count.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: Threshold | AdaptiveThreshold | NamedThresholds,
        request: Request,
        monitor: Monitor | None,
    ) -> None:
        self._hooks: list[Any] = []
        self._optimizer, self._monitor, self._request = optimizer, monitor, request
        params = ParameterList.of(groups_of(optimizer), own_thresholds=True)
        self._alone = processes_of(params, request.process_group, request.mesh) is ONE_PROCESS
        self.max_norm = max_norm
        self.norm: torch.Tensor | None = None
        self.threshold: float | torch.Tensor | None = None
        self.steps = 0
        self._loading: Mapping[str, Any] | None = None
        self._clipped: Any = 0
        self._num_skipped: Any = 0
        self._parts: Sequence[StepPart] = ()
        self._own: Sequence[Any] = ()
        self._names: list[list[str]] = []
        # A step that was compiled before must stop here: compiled code would treat what is measured as a constant.
        self._hooks = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._begin)),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._check_saved),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]
        put_runner_last(optimizer)
        for given in (monitor, *map(_adaptive, optimizer.param_groups)):
            claim(given, self)
        _CLIPPED.add(optimizer)
        self._others = ClippedBefore(optimizer)
        self._elsewhere = Elsewhere(optimizer, "clip_at_step")
        self._scaled = None if self._alone else ScaledSteps(optimizer, self._unscale, self._skip)

    @property
    def max_norm(self) -> float | AdaptiveThreshold | NamedThresholds:
        """The threshold, the `AdaptiveThreshold` that sets it, or both by patterns of names."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: Threshold | AdaptiveThreshold | NamedThresholds) -> None:
        for one in each_threshold(value):
            check_free(one, self._clips(), self)
        self._max_norm: float | AdaptiveThreshold | NamedThresholds = self._checked(value)
        for one in each_threshold(value):
            claim(one, self)

    @property
    def scope(self) -> Scope:
        """Which elements share a norm."""
        return self._request.scope

    def _follows(self, given: object) -> bool:
        """Return whether it clips, and records the norms in what is given, an `AdaptiveThreshold` or a `Monitor`."""
        kept = (*each_threshold(self._max_norm), self._monitor, *map(_adaptive, self._optimizer.param_groups))
        return bool(self._hooks) and any(given is one for one in kept)

    def _clips(self) -> set[int]:
        """Return the identities of the parameters of its optimizer."""
        return parameters_of(self._optimizer)

    def remove(self) -> None:
        """Stop clipping: from the next step on, the optimizer gets the gradients unchanged."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if hooks:  # later, others may clip this optimizer
            self._detached()

    _called = "StepClipping"
    _fused = False  # whether the step itself clips

    def _says(self) -> Sequence[str]:
        kind, settings = type(self._optimizer).__name__, f"scope={self.scope!r}, fused={self._fused}"
        return kind, as_passed(self._max_norm), settings, many(self.steps, "step")

    @property
    def _is_removed(self) -> bool:
        return not self._hooks

    def _detached(self) -> None:
        _CLIPPED.discard(self._optimizer)
        self._others.stop()
        self._elsewhere.stop()
        if self._scaled is not None:
            self._scaled.stop()

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return what to log of the last step, as scalar tensors; empty before the first. It waits for no device.

        "grad_norm" is the norm before clipping, "grad_norm_clipped" that of what the optimizer got, "clipped_share" and
        "skipped_share" the shares of the steps of this object that were clipped and skipped. A step that was skipped is
        not clipped, and got 0.

        With scope="layer" or "unit", a step was clipped if a layer or unit was, and "clipped_layer_share" or
        "clipped_unit_share" is the share of the layers or units with gradients that the last step clipped; 0 if it was
        skipped. With "agc" there is "grad_norm" alone, and nothing without a norm.
        """
        if self.norm is None or not self.steps:
            return {}
        got = left_of_all(self._parts, self._request.order.p, blanks=self._request.nonfinite.blanks)
        each = self.norm.new_ones(()) / self.steps
        shares = {"clipped_share": each * self._clipped, "skipped_share": each * self._num_skipped}
        return {"grad_norm": self.norm, "grad_norm_clipped": got.to(self.norm), **shares}

    # The step

    @abstractmethod
    def _checked(
        self, max_norm: Threshold | AdaptiveThreshold | NamedThresholds
    ) -> float | AdaptiveThreshold | NamedThresholds:
        """Return a threshold as it is kept, or raise."""

    @abstractmethod
    def _clip(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        """Clip the gradients of the next update. `kwargs` are the arguments of the step."""

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip before the update; if a closure computes the gradients, clip after the closure, at each call of it."""
        if makes_state(optimizer):
            return None
        self._elsewhere.arrived()

        def wrapped(closure: Closure) -> Closure:
            def clipped_after(*given: Any, **named: Any) -> Any:
                loss = closure(*given, **named)
                self._clip_alone(optimizer, kwargs)
                return loss

            return clipped_after

        found = with_closure(args, kwargs, wrapped)
        if found is None:
            self._clip_alone(optimizer, kwargs)
        return found

    def _clip_alone(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        """Clip, and warn if the gradients were clipped before. A step that gets no gradients does not count."""
        if self._has_nothing(optimizer):
            self.norm = torch.zeros(())
            self._parts = [StepPart(self.norm, math.inf, math.inf)]
            return
        self._others.begin()
        try:
            with may_lack_gradients(p for group in optimizer.param_groups for p in group["params"]):
                self._clip(optimizer, kwargs)
        finally:
            self._others.end()

    def _take_thresholds(self, groups: list[dict[str, Any]]) -> None:
        """Claim each `AdaptiveThreshold` of parameter groups, which may be new."""
        with telling(groups, self._request.process_group, self._request.mesh, each=True):
            for one in filter(None, map(_adaptive, groups)):
                take(one, self)

    def _unscale(self, unscale: Callable[[], None]) -> None:
        """Have a GradScaler unscale the gradients. An error also reaches the other processes."""
        groups, request = groups_of(self._optimizer), self._request
        with telling(groups, request.process_group, request.mesh, each=have_thresholds(groups)):
            unscale()

    def _skip(self) -> None:
        """Take part in a step that a GradScaler skips on this process."""
        self._clip_alone(self._optimizer, {})

    def _has_nothing(self, optimizer: Optimizer) -> bool:
        """Return whether there is no gradient, and no other process may have one of these parameters."""
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return False
        params = ParameterList.of(groups_of(optimizer), own_thresholds=True)
        if processes_of(params, self._request.process_group, self._request.mesh) is not ONE_PROCESS:
            return False
        params.check_no_engine_holds(some_lack=True)
        return True

    def _stepped(self, norm: torch.Tensor, parts: Sequence[StepPart], *, common: bool = True) -> None:
        """Record what a step has clipped. `common`: the first part is that of the threshold for all."""
        self.norm, self.steps, self._parts = norm, self.steps + 1, parts
        self.threshold = parts[0].threshold if common else self.threshold
        blanks = self._request.nonfinite.blanks
        clipped, skipped = zip(*(part.shown(blanks=blanks) for part in parts), strict=True)
        self._clipped = self._clipped + _any(reduce(or_, clipped))
        if blanks or any(part.skip_above < math.inf for part in parts):
            self._num_skipped = self._num_skipped + _any(reduce(or_, skipped))

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Python numbers: that of each `AdaptiveThreshold`; empty for fixed thresholds.

        The optimizer's own `state_dict` has it under "gradclip", and its `load_state_dict` loads it from there.
        """
        state: dict[str, Any] = {}
        if isinstance(self._max_norm, AdaptiveThreshold):
            state["max_norm"] = self._max_norm.state_dict()
        if named := self._named():
            state["patterns"] = {pattern: one.state_dict() for pattern, one in named.items()}
        own = [_adaptive(group) for group in self._optimizer.param_groups]
        if any(own):
            state["groups"] = [one and one.state_dict() for one in own]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Thresholds of an `AdaptiveThreshold` are equal to those of an uninterrupted run.

        A fixed threshold stays as it is, whatever the state holds. Raises ValueError as `AdaptiveThreshold` does.
        """
        self._check_loads(state)  # an error must change none of them
        for one, saved in self._saved(state):
            one.load_state_dict(saved)

    def _check_loads(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a threshold cannot be loaded, or follows one norm where each layer has its own."""
        for one, saved in self._saved(state):
            loaded = copy.copy(one)
            loaded.load_state_dict(saved)
            if loaded._order is not None and (loaded._layers is None) is (self.scope == "layer"):
                what = "one norm of all gradients" if loaded._layers is None else "the norm of each layer"
                raise ValueError(
                    f"the saved state follows {what}, which scope={self.scope!r} does not. Call clip_at_step with the "
                    f"scope of the run that saved it. Or begin a new history: leave {_KEY!r} out of the state."
                )

    def _saved(self, state: Mapping[str, Any]) -> list[tuple[AdaptiveThreshold, Any]]:
        """Return each `AdaptiveThreshold` that has a state, with that state."""
        own = [_adaptive(group) for group in self._optimizer.param_groups]
        common = self._max_norm if isinstance(self._max_norm, AdaptiveThreshold) else None
        named = [(one, state.get("patterns", {}).get(pattern)) for pattern, one in self._named().items()]
        each = [(common, state.get("max_norm")), *named, *zip(own, state.get("groups", ()), strict=False)]
        return [(one, saved) for one, saved in each if one is not None and saved is not None]

    def _named(self) -> dict[str, AdaptiveThreshold]:
        """Return each `AdaptiveThreshold` of a pattern."""
        found = self._max_norm if isinstance(self._max_norm, Mapping) else {}
        return {pattern: one for pattern, one in found.items() if isinstance(one, AdaptiveThreshold)}

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if found := self.state_dict():
            state[_KEY] = found
        for group in state["param_groups"]:
            if _adaptive(group) is not None:  # files hold its state, and no other objects
                group["max_norm"] = FOLLOWS

    def _check_saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take the state out of a copy of what is loaded, and raise for one that cannot be loaded."""
        self._loading = state.pop(_KEY, None)
        self._own = [group.get("max_norm", _ABSENT) for group in optimizer.param_groups]
        self._names = [group.get("param_names") or [] for group in optimizer.param_groups]
        self._check_loads(self._loading or {})

    def _load(self, optimizer: Optimizer) -> None:
        """Load the state, and give groups their thresholds back: PyTorch replaces all keys by those of the file."""
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            if isinstance(own, AdaptiveThreshold) or isinstance(group.get("max_norm", FOLLOWS), str):
                group["max_norm"] = own
            if group["max_norm"] is _ABSENT:
                del group["max_norm"]
        loaded = [group.get("param_names") or [] for group in optimizer.param_groups]
        if sorted(chain(*self._names)) == sorted(chain(*loaded)):  # PyTorch takes them from the file by their places
            for group, names in zip(optimizer.param_groups, self._names, strict=True):
                group.update({"param_names": names} if names else {})
        state, self._loading = self._loading, None
        if state is not None:
            self.load_state_dict(state)


def _any(flags: bool | torch.Tensor) -> bool | torch.Tensor:
    return flags.any() if isinstance(flags, torch.Tensor) and flags.ndim else flags


def _adaptive(group: Mapping[str, Any]) -> AdaptiveThreshold | None:
    found = group.get("max_norm")
    return found if isinstance(found, AdaptiveThreshold) else None
