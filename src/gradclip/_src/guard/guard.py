"""`guard`: look at what the steps of an optimizer really get. It imports PyTorch only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradclip._src.annotations import Meshes, OnMistake, Ord, ProcessGroups, Threshold
from gradclip._src.core.norms import Order
from gradclip._src.guard.settings import Handle, Settings, seems_a_handle
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.public import public
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from gradclip._src.guard.step import StepGuard
else:
    ProcessGroup = Optimizer = StepGuard = Any


@public
@with_advice
def guard(
    optimizer: Optimizer,
    max_norm: Threshold | AdaptiveThreshold | Handle | None = None,
    *,
    every: int = 100,
    ord: Ord | Order = 2,
    on_mistake: OnMistake = "warn",
    stop_after: int | None = None,
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    replicas: ProcessGroup | bool | None = None,
) -> StepGuard:
    """Look at what the steps of a PyTorch optimizer really get, and warn of mistakes in how gradients are clipped.

    Args:
        optimizer: an optimizer of PyTorch, of any kind. If it steps another one, as SAM and Lookahead do, the steps of
            that one are looked at; so are those of the `.optimizer` of a learning rate scheduler or another object.
        max_norm: the threshold that the global norm of its gradients should not exceed at a step: a number, the
            `gradclip.AdaptiveThreshold` that you clip with, or what `gradclip.clip_at_step`
            returned. None or inf: expect no bound, for example if you clip each layer or
            each element. Calls with thresholds for groups or names are not held to a bound.
        every: how many steps from one look to the next, at least 1. It also looks at the first two steps.
        ord: which norm `max_norm` is for, as in `gradclip.global_norm`.
        on_mistake: "warn": a `gradclip.ClippingWarning`, once for each kind of mistake. "raise": a
            `gradclip.ClippingError` instead, before the parameters change.
        stop_after: after so many skipped steps in a row, raise a `gradclip.ClippingError`; None: never.
        process_group: as in `gradclip.clip_grad_norm_`, if each process holds different parameters: the norm is then
            that of all. All of these processes must have a guard and step together, since they measure together. This
            also holds for distributed tensors (FSDP2, TP), for which you need not pass it.
        mesh: the same, given as a mesh.
        replicas: the process group whose processes hold the same parameters and should get the same gradients. None:
            all processes, if torch.distributed is initialized and the parameters were equal at the first look. False:
            none, for example if processes average parameters instead of gradients.

    Returns:
        A handle: `.reports`, the first finding of each kind, with `.step`, `.kind`, `.sentence` and `.fix`; `.norm`,
        the norm that the optimizer got at the last look; `.steps`, `.looks` and `.num_skipped`; `.remove()` to stop, or
        the end of a `with`.

    Raises:
        TypeError: the optimizer is not one of PyTorch, or its steps cannot be seen; `max_norm`, `every` or `stop_after`
            has a wrong type.
        ValueError: `max_norm` is negative or NaN, `every` or `stop_after` is below 1, `ord` or `on_mistake` is unknown,
            or the parameters are FSDP1 shards without a process group.

    The kinds of mistakes:

    | `.kind` | what was seen |
    |---|---|
    | "after_step" | gradients were clipped after the step that used them |
    | "before_backward" | gradients were clipped before `backward()` added to them |
    | "other_parameters" | a call did not get all parameters of the optimizer |
    | "still_scaled" | gradients were clipped before `scaler.unscale_` |
    | "ranks_disagree" | processes with the same parameters got gradients of different norms |
    | "used_up" | a call got no parameters, such as a generator that was used before |
    | "clipped_twice" | gradients were clipped between the backward passes of one step |
    | "tiny_coefficient" | clipping multiplied the gradients by less than 1e-6 |
    | "skipped" | a step was skipped |
    | "not_clipped" | the norm was above `max_norm` for another reason |
    | "nonfinite" | the optimizer got NaN or infinity |

    A step that `torch.amp.GradScaler` skips is ordinary: only three in a row are reported. Up to 40 skips before its
    first step do not count, because it looks for its scale there.

    At a look it measures all gradients, and a few small ones before and after each backward pass; this waits for the
    device. At other steps it counts, and does not wait. On an accelerator, skipped steps are noticed at the next look.

    As long as a guard is there, the functions by which `torch.nn.utils` scales and clamps gradients, and
    `torch.amp.GradScaler.step`, are wrapped to tell it of their calls. `remove()` of the last guard restores them. What
    other code does to gradients is seen by norms alone.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> watched = guard(optimizer, max_norm=1.0)
    >>> (weight @ torch.tensor([3.0, 4.0])).backward()
    >>> norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    >>> optimizer.step()
    >>> watched
    StepGuard(SGD, max_norm=1.0, 1 step, 1 look, norm 1 at the last, no mistake)
    >>> watched.remove()

    """
    settings = Settings(every, Order.parse(ord), on_mistake, stop_after, process_group, mesh, replicas)
    limit = max_norm if max_norm is None or seems_a_handle(max_norm) else float(check_threshold(max_norm))
    # They import PyTorch.
    from gradclip._src.guard.step import StepGuard
    from gradclip._src.step.wrapped import unwrapped

    return StepGuard(unwrapped(optimizer), limit, settings)
