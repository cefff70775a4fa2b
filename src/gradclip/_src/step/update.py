"""Clip what the steps of a PyTorch optimizer change, instead of the gradients that they get.

The parameters are copied before the step, so the change is known after it. Optimizers of PyTorch update each parameter
by itself. Their step runs for some parameters after the others, so that few are copied at a time. It runs on a
stand-in that shares state and settings, since other hooks may look at the groups of the optimizer itself. This must be
after all other hooks before the step, which may change gradients. Where it is not, and for other optimizers, all
parameters are copied.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradclip._src.annotations import Threshold
from gradclip._src.backends.torch.distributed import fsdp1_shard
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.public import record
from gradclip._src.step.at_step import all_of, is_stepping, within_its_own_step
from gradclip._src.step.attached import Attached, many
from gradclip._src.step.bounded import shorten
from gradclip._src.step.others import Elsewhere
from gradclip._src.step.within import makes_state
from gradclip._src.step.wrapped import Closure, is_deepspeed, is_megatron, put_runner_last, unwrapped, with_closure

_BY_PARAMETER = frozenset(
    getattr(optim, name, None)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
        *("SGD", "SparseAdam"),
    )
)
"""Optimizers whose step updates each parameter by its own gradient and state alone. Subclasses may do otherwise."""
_COPIED_AT_ONCE = 2**22
"""Bytes of parameters in host memory that are copied together; a larger parameter is copied alone."""
_COPIED_ON_DEVICE = 2**28
"""The same on an accelerator, where each part of a step must be worth its start."""
_ALIGNED = 64  # bytes, as PyTorch allocates
_CLIPPED: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class _Copied(NamedTuple):
    """Parameters of a group before a step, and the learning rate of that step."""

    rate: float | torch.Tensor
    parameters: Sequence[torch.Tensor]
    before: Sequence[torch.Tensor]


class _Room:
    """Host memory for copies, which the next copies overwrite: to get new memory takes longer than to copy."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copies(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in the layouts of the parameters."""
        sizes = [-(-one.nbytes // _ALIGNED) * _ALIGNED if _is_on_host(one) else 0 for one in parameters]
        if sum(sizes) > len(self._bytes):
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        rooms = self._bytes[: sum(sizes)].split(sizes)
        return [_copy(one, room) if len(room) else one.clone() for one, room in zip(parameters, rooms, strict=True)]


def _is_on_host(one: torch.Tensor) -> bool:
    return type(one) is torch.Tensor and one.device.type == "cpu"


def _copy(one: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    dense = torch.empty_like(one, device="meta")
    return room[: one.nbytes].view(one.dtype).as_strided(dense.shape, dense.stride()).copy_(one)


@record
class UpdateClipping(Attached):
    """Clipping of what the steps of one optimizer change, until `remove()`.

    Attributes:
        rms: the largest root mean square of a parameter's update at the last step, before clipping, divided by the
            learning rate; NaN or inf if an update was. None before the first step.
        max_rms: the bound. You may assign a new one; it applies from the next step on.
        steps: the number of steps.

    """

    _called = "UpdateClipping"

    def __init__(self, optimizer: Optimizer, max_rms: Threshold) -> None:
        self._optimizer = optimizer
        self.max_rms = max_rms
        self.rms: torch.Tensor | None = None
        self.steps = 0
        self._clipped: Any = 0
        self._copies: list[list[_Copied] | None] = []  # one for each running step of the optimizer
        self._largest: list[torch.Tensor] = []
        self._room = _Room()
        self._stand_in = object.__new__(type(optimizer))
        # Compiled code would treat what is measured as a constant.
        self._before = optimizer.register_step_pre_hook(torch.compiler.disable(self._begin))
        self._after = optimizer.register_step_post_hook(torch.compiler.disable(self._end))
        put_runner_last(optimizer, self._before.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)  # others see what is stored
        self._elsewhere = Elsewhere(optimizer, "clip_update_at_step")
        _CLIPPED.add(optimizer)

    @property
    def max_rms(self) -> float:
        """The bound."""
        return self._max_rms

    @max_rms.setter
    def max_rms(self, value: Threshold) -> None:
        self._max_rms = float(check_threshold(value, "max_rms"))

    def remove(self) -> None:
        """Stop clipping: the next step changes what the optimizer says."""
        if not self._is_removed:
            self._before.remove()
            self._after.remove()
            self._elsewhere.stop()
            _CLIPPED.discard(self._optimizer)

    def _says(self) -> Sequence[str]:
        return type(self._optimizer).__name__, f"max_rms={self._max_rms!r}", many(self.steps, "step")

    @property
    def _is_removed(self) -> bool:
        return self._optimizer not in _CLIPPED

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return what to log of the last step, as scalar tensors; empty before the first. It waits for no device.

        "update_rms" is the largest RMS before clipping, in units of the learning rate, "update_clipped_share" the share
        of the steps of this object in which at least one update was clipped.
        """
        if self.rms is None:
            return {}
        return {"update_rms": self.rms, "update_clipped_share": self.rms.new_ones(()) * self._clipped / self.steps}

    # The step

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = within_its_own_step(optimizer)
        if not inner and not (self._copies and is_stepping(optimizer)):  # an error may have left copies
            self._copies, self._largest = [], []
        if inner or makes_state(optimizer):
            self._copies.append(None)
            return None
        self._elsewhere.arrived()
        groups = optimizer.param_groups
        for group in groups:
            _rate(group)
        at_once = type(optimizer) not in _BY_PARAMETER or _shares_eps(optimizer) or _share_memory(all_of(groups))
        if at_once or not self._is_last:
            self._copies.append([_copied(group, _trained(group["params"]), _Room()) for group in groups])
            return None
        self._copies.append([])

        def wrapped(closure: Closure) -> Closure:
            def with_step(*given: Any, **named: Any) -> Any:
                loss = closure(*given, **named)
                self._step_by_parameters(optimizer)
                return loss

            return with_step

        found = with_closure(args, kwargs, wrapped)
        if found is None:
            self._step_by_parameters(optimizer)
            found = args, kwargs
        else:
            self._stands_for(optimizer, _emptied(optimizer.param_groups))
        return (self._stand_in, *found[0][1:]), found[1]

    @torch.no_grad()
    def _step_by_parameters(self, optimizer: Optimizer) -> None:
        """Step some parameters after the others. Afterwards, a step of the stand-in finds none."""
        step = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without its hooks
        for group in optimizer.param_groups:
            for some in _in_parts(group["params"]):
                copied = _copied(group, some, self._room)
                self._stands_for(optimizer, [{**group, "params": some}])
                step(self._stand_in)
                for name in vars(self._stand_in).keys() - vars(optimizer).keys():  # such as that it has warned
                    setattr(optimizer, name, getattr(self._stand_in, name))
                self._shorten(copied)
        self._stands_for(optimizer, _emptied(optimizer.param_groups))

    def _stands_for(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        vars(self._stand_in).clear()  # what a GradScaler has set must not stay
        vars(self._stand_in).update(vars(optimizer), param_groups=groups)
        self._stand_in._optimizer_step_pre_hooks = {}  # a step that somebody has patched runs them
        self._stand_in._optimizer_step_post_hooks = {}

    @property
    def _is_last(self) -> bool:
        """Whether all other hooks before the step come before this one."""
        return next(reversed(self._optimizer._optimizer_step_pre_hooks)) == self._before.id

    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        copies = self._copies.pop() if self._copies else None
        for copied in copies or ():
            self._shorten(copied)
        if copies is None:
            return
        put_runner_last(optimizer)  # others may have registered hooks since
        each = self._largest or [torch.zeros((), device="cpu")]
        self.rms = torch.stack([one.to(each[0].device) for one in each]).max()
        self.steps, self._clipped = self.steps + 1, self._clipped + (self.rms > self._max_rms)

    def _shorten(self, copied: _Copied) -> None:
        if copied.parameters:
            self._largest.append(shorten(copied.parameters, copied.before, copied.rate, self._max_rms))


def _copied(group: Mapping[str, Any], parameters: Sequence[torch.Tensor], room: _Room) -> _Copied:
    some = [one.detach() for one in parameters if one.numel()]
    return _Copied(_rate(group), some, room.copies(some))


def _shares_eps(optimizer: Optimizer) -> bool:
    """Say whether Adafactor takes the epsilon of parameters from the dtype of another one."""
    several = (len({one.dtype for one in group["params"]}) > 1 for group in optimizer.param_groups)
    return type(optimizer).__name__ == "Adafactor" and any(several)


def _share_memory(parameters: Sequence[torch.Tensor]) -> bool:
    """Say whether parameters begin at the same place in memory, which a step then changes several times."""
    plain = (one for one in parameters if type(one) in (torch.nn.Parameter, torch.Tensor))
    placed = (one for one in plain if (one.is_cpu or one.is_cuda) and one.layout is torch.strided)
    starts = [start for one in placed if (start := one.data_ptr())]  # 0 without elements
    return len({*starts}) < len(starts)


def _trained(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a step may change: frozen parameters, too, as long as they have a gradient."""
    return [one for one in parameters if one.requires_grad or one.grad is not None]


def _in_parts(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters that a step changes, some at a time."""
    some: list[torch.Tensor] = []
    size = 0
    for one in _trained(parameters):
        if one.grad is None and not isinstance(one, DTensor):  # other processes may have its gradient
            continue
        if some and size + one.nbytes > (_COPIED_AT_ONCE if one.device.type == "cpu" else _COPIED_ON_DEVICE):
            yield some
            some, size = [], 0
        some, size = [*some, one], size + one.nbytes
    if some:
        yield some


def _emptied(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": []} for group in groups]


def _rate(group: Mapping[str, Any]) -> float | torch.Tensor:
    """Return the learning rate of a group; on an accelerator, where it is not read, a copy of the tensor."""
    if group.get("lr") is None:
        raise ValueError(
            "a parameter group has no 'lr', and the bound of its updates is max_rms times the learning rate. Set "
            "group['lr'] to the learning rate that its step has."
        )
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        return rate.detach().clone().reshape(())
    return float(check_threshold(rate.item() if isinstance(rate, torch.Tensor) else rate, "lr"))


def attach_to_updates(given: object, max_rms: Threshold) -> UpdateClipping:
    """Make the steps of an optimizer clip what they change, as `clip_update_at_step` says."""
    if is_deepspeed(given) or is_megatron(given):
        raise TypeError(
            f"clip_update_at_step takes an optimizer that updates the parameters of its groups, got "
            f"{type(given).__name__}, an engine that updates copies in its own buffers. Clip its gradients: call "
            "gradclip.clip_at_step with the engine."
        )
    optimizer = unwrapped(given)
    _check_kind(optimizer)
    if optimizer in _CLIPPED:
        raise ValueError(
            "the updates of this optimizer are clipped already: clip_update_at_step was already called for it. Assign "
            "max_rms of what it returned, or call its remove() first."
        )
    for group in optimizer.param_groups:
        _rate(group)
    if fsdp1_shard(all_of(optimizer.param_groups)) is not None:
        raise ValueError(
            "the parameters are shards of FullyShardedDataParallel (FSDP1): they are flat, so that one parameter "
            "cannot be told from the next. Use fully_shard (FSDP2)."
        )
    return UpdateClipping(optimizer, max_rms)


def _check_kind(optimizer: Optimizer) -> None:
    """Raise for an optimizer that would go on from what it has computed, and not from what is stored."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS | optim.ASGD) or callable(getattr(optimizer, "eval", None)):
        raise TypeError(
            f"{kind} keeps in its state what its updates made of the parameters: points of a search, or an average. So "
            "it would go on from other values than are stored. Clip its gradients: call gradclip.clip_at_step."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"this {kind} has differentiable=True, and an update that is clipped afterwards has no derivative. Make it "
            "without differentiable=True."
        )
