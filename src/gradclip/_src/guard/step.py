"""Look at what the steps of an optimizer get, and tell of mistakes."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from gradclip._src.annotations import Parameters, Scalar
from gradclip._src.backends.torch.tensors import without_values
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.distributed.processes import ONE_PROCESS, processes_of
from gradclip._src.guard.judge import FIXES, Facts, Finding, judged
from gradclip._src.guard.settings import Handle, Settings, as_number, seems_a_handle
from gradclip._src.guard.window import Window
from gradclip._src.inplace.norm import grad_norm
from gradclip._src.passed.parameters import ParameterList, have_thresholds, may_lack_gradients
from gradclip._src.public import record
from gradclip._src.step import heard
from gradclip._src.step.attached import Attached, as_passed, many
from gradclip._src.step.heard import ClipCall, infinities, unscaled
from gradclip._src.step.others import Elsewhere, own_thresholds
from gradclip._src.step.warned import ClippingError, ClippingWarning, level_of_user
from gradclip._src.step.within import makes_state
from gradclip._src.step.wrapped import Closure, last_before_runner, put_runner_last, with_closure
from gradclip._src.thresholds.holder import AdaptiveThreshold

OFTEN = 3
"""A GradScaler finds its scale by trying: fewer skipped steps in a row are ordinary."""

AT_FIRST = 40
"""Before the first step it may skip so many, each time with half the scale, and these do not count."""


class Skips:
    """The steps skipped so far: how many, and how many in a row until now.

    On an accelerator, what a step shows stays there until `read`, so that no step waits.
    """

    def __init__(self) -> None:
        self.count = self.streak = 0
        self._at_first = AT_FIRST
        self._scaler_alone = True
        self._call: ClipCall | None = None
        self._follows: AdaptiveThreshold | None = None
        self._counted = 0.0  # what it has counted
        self._pending: list[tuple[str, Any, bool]] = []

    @property
    def unusual(self) -> bool:
        """Whether this streak is to be told: one step is enough, unless a GradScaler alone has skipped."""
        return self.streak >= (OFTEN if self._scaler_alone else 1)

    def clipped(self, call: ClipCall) -> bool:
        """Note a call that has clipped. Return whether it shows that the step before it was left out.

        It does if the same call was made before it with a norm that is not finite, and no step came between.
        """
        last, self._call = self._call, replace(call, parameters=(call.parameters or ())[:1])
        if last is None or last.norm is None or not _same(last, call) or math.isfinite(float(last.norm)):
            return False
        self._note(True, by_scaler=False)
        return True

    def passed(self, found_inf: torch.Tensor | None, *, by_scaler: bool) -> None:
        """Note a step that was called; `found_inf` is 1 if the optimizer itself skips it."""
        call, self._call = self._call, None
        if found_inf is not None:
            self._later("flag", found_inf, by_scaler)
        elif call is not None and isinstance(call.max_norm, AdaptiveThreshold) and call.max_norm._layers is None:
            counted = call.max_norm._counts["num_skipped"]
            if self._follows is not call.max_norm:  # it may have skipped steps before this guard was there
                self._follows = call.max_norm
                self._later("before", counted - _skipped_by(call, call.max_norm), False)
            self._later("count", counted, False)
        elif call is not None and Nonfinite.named(call.nonfinite).blanks and call.norm is not None:
            self._later("norm", call.norm, by_scaler)
        else:
            self._later("flag", 0.0, by_scaler)

    def left_out(self) -> None:
        """Note a step that a GradScaler did not call."""
        self._call = None
        self._note(True, by_scaler=True)

    def read(self) -> None:
        """Count the steps whose results are still on a device."""
        pending, self._pending = self._pending, []
        tensors = [value.detach().reshape(()) for _, value, _ in pending if isinstance(value, torch.Tensor)]
        if not tensors:
            return
        values = iter(torch.stack([one.to(tensors[0].device, torch.float32) for one in tensors]).tolist())
        for kind, value, by_scaler in pending:
            self._settle(kind, next(values) if isinstance(value, torch.Tensor) else float(value), by_scaler)

    def _later(self, kind: str, value: Scalar, by_scaler: bool) -> None:
        waits = isinstance(value, torch.Tensor) and value.device.type != "cpu"
        if waits or self._pending:
            self._pending.append((kind, value, by_scaler))
        else:
            self._settle(kind, float(value), by_scaler)

    def _settle(self, kind: str, value: float, by_scaler: bool) -> None:
        if kind == "before":
            self._counted = value
        elif kind == "count":
            before, self._counted = self._counted, value
            self._note(value > before, by_scaler=by_scaler)
        else:
            self._note(value == 1.0 if kind == "flag" else not math.isfinite(value), by_scaler=by_scaler)

    def _note(self, skipped: bool, *, by_scaler: bool) -> None:
        if not skipped:
            self.streak, self._at_first, self._scaler_alone = 0, 0, True
        elif by_scaler and self._at_first:
            self._at_first -= 1
        else:
            self.count, self.streak = self.count + 1, self.streak + 1
            self._scaler_alone = self._scaler_alone and by_scaler


def _skipped_by(call: ClipCall, max_norm: AdaptiveThreshold) -> Any:
    """Return 1 if a call has skipped its step, else 0, by its norm."""
    norm = torch.as_tensor(call.norm)
    spike = norm > max_norm.skip_above * (math.inf if max_norm.max_norm is None else max_norm.max_norm)
    finite = torch.isfinite(norm)
    skipped = (spike & finite) | ~finite if Nonfinite.named(call.nonfinite).blanks else spike & finite
    return skipped.to(torch.float32) if norm.device.type != "cpu" else float(skipped)


def _same(one: ClipCall, other: ClipCall) -> bool:
    """Say whether two calls are the same, of two iterations."""
    first, second = one.parameters or (), other.parameters or ()
    return one.function == other.function and len(first) > 0 and len(second) > 0 and first[0] is second[0]


@record
class StepGuard(Attached, heard.Watcher):
    """A guard of one optimizer, until `remove()`. Print it for all that it has found.

    Attributes:
        norm: the norm that the optimizer got at the last look; None before the first.
        reports: what was found: of each kind of mistake the first, as a `Finding` with `.step`, `.kind`, `.sentence`
            and `.fix`.
        steps: the number of steps since the guard was made.
        looks: the number of steps at which it has looked.
        num_skipped: the number of steps that were skipped, as far as they are known.

    """

    def __init__(
        self, optimizer: Optimizer, max_norm: float | AdaptiveThreshold | Handle | None, settings: Settings
    ) -> None:
        self._optimizer = optimizer
        self.norm: float | None = None
        self.reports: list[Finding] = []
        self.steps = self.looks = 0
        self._max_norm, self._settings = max_norm, settings
        self._skips = Skips()
        self._followed = self._had_gradients = self._overflowed = self._several = False
        self._scaler: torch.amp.GradScaler | None = None
        self._steps_before = self._left_out = 0
        processes_of(ParameterList.of(self._groups()), settings.process_group, settings.mesh)
        self._ranks = settings.ranks(self._parameters())
        self._window: Window | None = None
        self._removed = False
        self._hook = torch.compiler.disable(self._before)  # once: making it takes longer than a look
        self._post = optimizer.register_step_post_hook(torch.compiler.disable(self._after))
        self._open(after_step=False)
        self._elsewhere = Elsewhere(optimizer, "guard")
        heard.watch(self)

    @property
    def _watching(self) -> bool:
        """Whether it will look at the next step."""
        return self._window is not None

    @property
    def num_skipped(self) -> int:
        """The number of steps that were skipped, as far as they are known."""
        return self._skips.count

    def remove(self) -> None:
        """Stop. If no other guard is left, PyTorch's functions are again its own."""
        self._removed = True
        self._pre.remove()
        self._post.remove()
        self._elsewhere.stop()
        if self._window is not None:
            self._window.close()
        self._window = None
        heard.unwatch(self)

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *(f"- {one.kind}, {one}" for one in self.reports)])

    _called = "StepGuard"

    def _says(self) -> Sequence[str]:
        given = self._adaptive or (self._max_norm.max_norm if seems_a_handle(self._max_norm) else self._max_norm)
        return (
            type(self._optimizer).__name__,
            as_passed(given),
            many(self.steps, "step"),
            f"{self.num_skipped} skipped" if self.num_skipped else "",
            many(self.looks, "look"),
            "" if self.norm is None else f"norm {self.norm:.4g} at the last",
            many(len(self.reports), "mistake") if self.reports else "no mistake",
        )

    @property
    def _is_removed(self) -> bool:
        return self._removed

    # What it hears of

    def _clipped(self, call: ClipCall) -> None:
        """Hear of a call that has clipped."""
        if self._window is not None:
            self._window.clipped(call, set(map(id, self._parameters())))
        given = call.parameters
        self._followed = self._followed or call.max_norm is self._adaptive is not None
        mine = given is None or (len(given) > 0 and id(given[0]) in self._mine)
        if mine and not call.in_backward and self._skips.clipped(call):
            self._tell_of_skips()

    def _stepping(self, scaler: torch.amp.GradScaler, outer: Any) -> None:
        """Hear that a GradScaler is about to step the optimizer, or one `outer` around it."""
        self._scaler, self._steps_before = scaler, self.steps
        asked = self._settings
        processes = processes_of(ParameterList.of(self._groups()), asked.process_group, asked.mesh)
        self._several = processes is not ONE_PROCESS
        if self._several and self._window is not None and not getattr(outer, "_step_supports_amp_scaling", 0):
            # Where the gradients overflow, the scaler does not step, and nobody is to wait for that process.
            unscaled(scaler, outer)
            found = any(one.item() for one in infinities(scaler, outer))
            self._overflowed = processes.anywhere(found)

    def _stepped(self, scaler: torch.amp.GradScaler, *, failed: bool) -> None:
        """Hear that it has stepped the optimizer, skipped the step, or failed."""
        self._scaler, self._overflowed = None, False
        if self.steps == self._steps_before and not failed:
            self._skips.left_out()
            if self._several:  # others may have stepped, and look when this process does
                self._left_out += 1
                self._open_if_due()
            self._tell_of_skips()

    # The step

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look before the step; if a closure computes the gradients, after its first call."""
        if makes_state(optimizer):
            return None
        self._elsewhere.arrived()
        self.steps += 1

        def wrapped(closure: Closure) -> Closure:
            arrived = False

            def looked_after(*given: Any, **named: Any) -> Any:
                nonlocal arrived
                loss = closure(*given, **named)
                if not arrived:
                    arrived = True
                    self._arrived(closure=True)
                return loss

            return looked_after

        found = with_closure(args, kwargs, wrapped)
        if found is None:
            self._arrived(closure=False)
        return found

    def _arrived(self, *, closure: bool) -> None:
        """Take note of what the step gets, and look at it if it is time."""
        found_inf = vars(self._optimizer).get("found_inf")
        if self._overflowed:  # on another process, so all skip
            self._skips.left_out()
        else:
            self._skips.passed(found_inf, by_scaler=self._scaler is not None)
        window = self._window
        if window is not None and self._is_last() and not self._overflowed and _can_read(self._parameters()):
            self._window = None
            try:
                self._look(window, found_inf, closure=closure)
            finally:
                window.close()
        if self._skips.streak:
            self._tell_of_skips()
        if self._ranks is not None and self._ranks.open and (said := self._ranks.differing()):
            self._tell("ranks_disagree", said)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start to watch what happens until the next step, if that is one to look at, or if this look was put off."""
        put_off = self._window is not None
        if self._window is not None:
            self._window.close()
            self._window = None
        self._open_if_due(put_off=put_off)

    def _open_if_due(self, *, put_off: bool = False) -> None:
        if put_off or (self._window is None and self._settings.is_look(self.steps + self._left_out + 1)):
            self._pre.remove()
            self._open(after_step=True)

    def _open(self, *, after_step: bool) -> None:
        """Watch until the next step. The hook comes after those that others have registered, such as `clip_at_step`."""
        parameters = self._parameters()
        self._pre = self._optimizer.register_step_pre_hook(self._hook)
        put_runner_last(self._optimizer)
        self._mine = set(map(id, parameters))
        self._followed = False
        self._observed = self._adaptive.steps if self._adaptive is not None else 0
        self._window = Window.opened(parameters, after_step=after_step)

    def _is_last(self) -> bool:
        return last_before_runner(self._optimizer) == self._pre.id

    # A look

    def _look(self, window: Window, found_inf: torch.Tensor | None, *, closure: bool) -> None:
        self.looks += 1
        self._skips.read()
        parameters = [one for one in self._parameters() if one.grad is not None]
        scale = vars(self._optimizer).get("grad_scale")
        divided = 1.0 if scale is None else float(scale)
        self.norm = norm = self._norm_of(self._groups()) / divided
        if found_inf is not None and float(found_inf) == 1.0:
            return
        facts = Facts(
            norm,
            self._threshold(),
            window.steps(self._parameters()),
            window.after_step and not window.full,
            parameters,
            _slack(parameters),
            self._settings.order.p,
            1.0 if self._scaler is None else self._scaler.get_scale(),
            closure,
            self._known(),
            lambda some: self._norm_of(some) / divided,
            lambda: self._by_parts(parameters),
        )
        clips_itself = max(own_thresholds(self._optimizer)) <= facts.max_norm < math.inf
        for kind, sentence in judged(facts):
            if not (kind == "not_clipped" and clips_itself):
                self._tell(kind, sentence)
        unused = self._adaptive is not None and self._adaptive.steps == 0 and self._had_gradients
        self._had_gradients = self._had_gradients or bool(parameters)
        if unused and window.after_step and not self._only_own():
            self._tell(
                "not_clipped", f"the optimizer got the norm {norm:.4g}, and nothing has used the AdaptiveThreshold."
            )
        if self._ranks is not None:
            self._ranks.publish(self.steps, parameters, window.witnesses, norm)

    def _groups(self) -> list[dict[str, Any]]:
        read = ("params", "process_group", "mesh", "shared")
        return [{name: group[name] for name in read if name in group} for group in self._optimizer.param_groups]

    def _parameters(self) -> list[Any]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _only_own(self) -> bool:
        """Say whether every parameter group has a threshold of its own, so that none is left for `max_norm`."""
        return all("max_norm" in group for group in self._optimizer.param_groups)

    @torch.no_grad()
    def _norm_of(self, parameters: Parameters, order: float | None = None) -> float:
        asked, params = self._settings, ParameterList.of(parameters)
        alone = processes_of(params, asked.process_group, asked.mesh) is ONE_PROCESS
        if alone and all(grad is None for grad in params.gradients):
            return 0.0  # `grad_norm` would warn
        order = asked.order.p if order is None else order
        with may_lack_gradients(params.parameters):
            return float(grad_norm(parameters, order, process_group=asked.process_group, mesh=asked.mesh))

    @property
    def _adaptive(self) -> AdaptiveThreshold | None:
        found = self._max_norm
        found = found if isinstance(found, AdaptiveThreshold) else getattr(found, "max_norm", None)
        return found if isinstance(found, AdaptiveThreshold) else None

    def _threshold(self) -> float:
        """Return the threshold of this step."""
        found = self._adaptive
        if seems_a_handle(self._max_norm) and have_thresholds(self._optimizer.param_groups):
            return math.inf  # those of the groups together are another bound
        if getattr(self._max_norm, "scope", "global") != "global":
            return math.inf  # of all gradients together there is no bound
        if found is not None and found._layers is not None:
            return math.inf
        if found is None:
            return as_number(self._max_norm.max_norm if seems_a_handle(self._max_norm) else self._max_norm)
        if self._followed:
            return as_number(found.max_norm)  # a call has observed its norm by now
        # Clipping within the step observes it at the end of the step, perhaps after this guard's own hook there.
        within = as_number(found.next_max_norm)
        return within if found.steps == self._observed else max(within, as_number(found.max_norm))

    def _known(self) -> tuple[float, float] | None:
        """Return the norm and the threshold of a handle that clips within the step."""
        handle = self._max_norm
        if isinstance(handle, AdaptiveThreshold) or not seems_a_handle(handle):
            return None
        return math.nan if handle.norm is None else float(handle.norm), self._threshold()

    def _by_parts(self, parameters: list[Any]) -> bool:
        """Say whether each element, or each gradient, seems to be clipped to the threshold by itself."""
        limit, slack = self._threshold(), _slack(parameters)
        largest = max((self._norm_of([one]) for one in parameters), default=0.0)
        return any(abs(one - limit) <= slack * limit for one in (largest, self._norm_of(parameters, math.inf)))

    # What it tells

    def _tell(self, kind: str, sentence: str) -> None:
        if any(one.kind == kind for one in self.reports):
            return
        finding = Finding.of(self.steps, kind, sentence[:1].upper() + sentence[1:])
        self.reports.append(finding)
        if self._settings.on_mistake == "raise":
            raise ClippingError(str(finding))
        warnings.warn(str(finding), ClippingWarning, stacklevel=level_of_user())

    def _tell_of_skips(self) -> None:
        streak, most = self._skips.streak, self._settings.stop_after
        told = "a step was" if streak == 1 else f"{streak} steps in a row were"
        if most is not None and streak >= most:
            raise ClippingError(f"Step {self.steps}: {told} skipped, and stop_after is {most}. {FIXES['skipped']}")
        if self._skips.unusual:
            self._tell("skipped", f"{told} skipped.")


def _slack(parameters: list[Any]) -> float:
    """Return by how much the norm may exceed the threshold: other libraries round in the dtype of the gradients."""
    return 0.02 if any(one.grad.dtype in (torch.float16, torch.bfloat16) for one in parameters) else 1e-3


def _can_read(parameters: list[Any]) -> bool:
    """Say whether gradients have values, and no CUDA graph records this step: it could not wait for the device."""
    if any(one.grad is not None and without_values(one.grad) for one in parameters):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
