"""Make the steps of an optimizer clip gradients or updates. PyTorch is imported only when that is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradclip._src.annotations import (
    Integers,
    Meshes,
    NamedThresholds,
    Ord,
    ProcessGroups,
    StepPolicy,
    Threshold,
    UnitAxis,
    Where,
)
from gradclip._src.monitor.monitor import Monitor
from gradclip._src.public import public
from gradclip._src.step.asked import Asked, Fused, Scope, Steps
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import with_advice

if TYPE_CHECKING:
    from gradclip._src.step.engine import EngineClipping
    from gradclip._src.step.handle import StepClipping
    from gradclip._src.step.update import UpdateClipping
else:
    EngineClipping = StepClipping = UpdateClipping = Any  # these import PyTorch


@public
@with_advice
def clip_at_step(
    optimizer: Steps,
    max_norm: Threshold | AdaptiveThreshold | NamedThresholds,
    *,
    fused: Fused = "auto",
    scope: Scope = "global",
    eps: Threshold | None = None,
    unit_axis: UnitAxis = None,
    ord: Ord = 2,
    nonfinite: StepPolicy = "propagate",
    process_group: ProcessGroups = None,
    mesh: Meshes = None,
    where: Where = None,
    integers: Integers = "keep",
    monitor: Monitor | None = None,
) -> StepClipping | EngineClipping:
    """Make each step of an optimizer, or of a training engine, clip the gradients of all its parameters together.

    Right before the update, gradients with the norm N are multiplied by min(1, max_norm / N). Nothing else in the loop
    changes, and trainers that call `step` themselves clip, too.

    Args:
        optimizer: any optimizer of PyTorch, also one that Lightning's `trainer.optimizers` or `accelerator.prepare`
            returns; a DeepSpeed engine, or an optimizer of Megatron-Core. If it steps another one, such as SAM,
            Lookahead, or the optimizer that Opacus returns, the steps of that one clip. Of a learning rate scheduler,
            or another object with an `.optimizer`, the steps of that optimizer clip. Two optimizers clip separately,
            and each needs its own `AdaptiveThreshold` and monitor: with the thresholds C1 and C2, their gradients
            together have a norm of at most sqrt(C1**2 + C2**2).
        max_norm: the threshold in the units of unscaled gradients, >= 0, or a `gradclip.AdaptiveThreshold`. A parameter
            group with a key "max_norm" has a threshold of its own, as in `gradclip.clip_grad_norm_`. As there, a dict
            maps patterns of names to thresholds, `{"encoder.*": 1.0, "*": None}`. Names come from optimizers that were
            made with `model.named_parameters()`.
        fused: whether a fused optimizer divides each gradient by max(1, N / max_norm) as it reads it, which saves a
            pass over the gradients. "auto": where it can. True: an error where it cannot. False: never.
        scope: what is clipped. "global": all gradients together. "layer", "unit", "value": each gradient, each unit of
            it, each element, as `gradclip.clip_grad_layer_norm_`, `clip_grad_unit_norm_` and `clip_grad_value_` do.
            "agc": each unit to `max_norm` times the norm of its weights, as `gradclip.adaptive_grad_clip_` does: leave
            out the last layer by `where`.
        eps: with `scope="agc"`, a lower limit for the norm of the weights; None for 1e-3.
        unit_axis: with `scope="unit"` or `"agc"`, the axis or axes that index the units, as in
            `gradclip.clip_by_unit_norm`. None for the framework's own layout.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: as in `gradclip.clip_grad_norm_`, but "skip" really skips the step, as does the `skip_above` of an
            `AdaptiveThreshold`: parameters and state of the optimizer do not change. Where groups have thresholds of
            their own, `skip_above` skips only the groups that share its threshold. GradScaler always skips such steps.
        process_group: as in `gradclip.clip_grad_norm_`, if each process holds different parameters. All processes must
            call `clip_at_step`, and step together.
        mesh: the same, given as a mesh.
        where: the gradients that count, by the names of their parameters, as in `gradclip.clip_grad_norm_`.
        integers: "raise" refuses integers, as there.
        monitor: a `gradclip.Monitor` that records the norm and the threshold at each step. With another `scope` than
            "global", as in `gradclip.clip_grad_layer_norm_`; "value" has no norm, so there it is a ValueError.

    Returns:
        A handle: read `.norm`, the norm before clipping at the last step; assign `.max_norm`; log `.numbers()`; call
        `.remove()` to stop, or use it in a `with`, which removes it at the end. Print it for what it does.

    Raises:
        TypeError: `optimizer` is none of the above, or its steps cannot be seen.
        ValueError: the steps of this optimizer clip already; the `AdaptiveThreshold` or the monitor follows another
            one; an argument that `gradclip.clip_grad_norm_` refuses. At a step: a GradScaler left the gradients scaled,
            and the optimizer cannot clip them so; the optimizer is one process's share of a ZeroRedundancyOptimizer.
        TypeError, ValueError: with `fused=True`, a step that cannot clip: that of another class than Adam, AdamW, SGD
            and Adagrad of PyTorch, or created without `fused=True`; `nonfinite="zero"`; thresholds of groups or
            names; `where` or `integers`; a threshold other than 0, inf, and 2**-50 to 2**100.
        RuntimeError: this call or a step failed on another process.
        FloatingPointError: at a step with `nonfinite="raise"`, the gradients contain NaN or infinity.

    A step may also raise the errors of `gradclip.clip_grad_norm_`. After an error at a step, the parameters are
    unchanged.

    With another `scope` than "global", `max_norm` is one number, or with "layer" an `AdaptiveThreshold`, which follows
    the norm of each layer. A fused step and thresholds of groups are a ValueError. `.norm` is that of all gradients
    before clipping; None for "value", and for units that are split over processes. "skip" then reads the gradients once
    more. "value" knows "propagate" and "skip" alone.

    If `step` gets a closure, gradients are clipped after each call of the closure. LBFGS calls it several times in a
    step: each gradient that it sees is clipped, and each counts as a step for `norm`, an `AdaptiveThreshold` and a
        monitor.

    A fused step that clips gets the same gradients as one after `gradclip.clip_grad_norm_`, to rounding, within the
    same bound. Besides speed, this differs:

    - With GradScaler it needs no `scaler.unscale_(optimizer)`. If it finds infinities on one process, all skip the step
      and lower their scales. All processes must start with the same scale.
    - Skipping does not wait for the device, and leaves `.grad` as it is. Before other steps that skip, each `.grad`
      becomes None, which waits for the accelerator.
    - In the step, `.grad` is not clipped yet: hooks registered after this call see it as it was. After the step it is.
      For half types, the update uses float32 quotients, for which the bound holds; `.grad` gets them rounded to
      nearest.
    - Thresholds of an `AdaptiveThreshold` are kept from 2**-50 to 2**100.

    It uses the attributes `grad_scale` and `found_inf` of fused optimizers, which `torch.amp.GradScaler` sets in
    PyTorch 2.13.

    DeepSpeed's engines and Megatron-Core's optimizers hold the gradients and clip them in their own step: that step
    gets the threshold, and its norm is taken in. So settings other than `max_norm` and `monitor` are a ValueError, as
    is a `max_norm` of 0, which they take for no clipping. A handle of theirs has floats.

    - DeepSpeed: pass the first of what `deepspeed.initialize` returns. ZeRO stages 0 to 3, with or without offloading,
      float32, float16 and bfloat16. Its `"gradient_clipping"` no longer counts. It reads the threshold before it knows
      the norm, so `skip_above` is a ValueError, as is an engine that has no optimizer, does not measure the norm
      (`"compute_grad_norm": false`), or updates at other times (ZenFlow). It scales by max_norm / (norm + 1e-6) in the
      dtype of its buffers, so the norm of the result may exceed `max_norm` by rounding. Save the handle's
      `state_dict()` in the `client_state` of `engine.save_checkpoint`.
    - Megatron-Core: pass what `get_megatron_optimizer` returns. Its `clip_grad` no longer counts, but for other
      optimizers with the same configuration. The optimizers of a `ChainedOptimizer` share the threshold. `skip_above`
      sets `grad_norm_skip_threshold`, which Megatron-Core 0.16.1 does not have: then it is a ValueError, as is a step
      in a CUDA graph. Save the handle's `state_dict()` in your checkpoint.

    Call it on every rank, with equal arguments: at each step the ranks compare their thresholds, and raise a
    RuntimeError if they differ. If they differ by rounding, all use the smallest. A step that the engine leaves out
    because of an overflow counts as skipped, and its norm is not observed.

    The history of an `AdaptiveThreshold`, also of one in a parameter group, is saved in the optimizer's `state_dict`,
    under "gradclip", and loaded from there: call `clip_at_step` before you load a checkpoint. Functions that keep only
    "state" and "param_groups", such as `torch.distributed.checkpoint.state_dict`, lose it, as does an optimizer around
    the one that steps, such as SAM: save the `state_dict()` of what is returned beside them. A copy of the optimizer
    does not clip: call `clip_at_step` for it.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> clipping = clip_at_step(optimizer, max_norm=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> clipping.norm, weight.detach()
    (tensor(5.), tensor([-0.6000, -0.8000]))

    Two clippings at once are a mistake: if a trainer or the loop has clipped all of these gradients by their global
    norm, too, one of the first two steps warns with a `gradclip.ClippingWarning`. It hears of gradclip's functions and
    of those of `torch.nn.utils`, which accelerate, Hugging Face's Trainer and Lightning call. This call also warns of
    an optimizer that clips in its own step to a lower "max_grad_norm", as LAMB does.

    If `optimizer` never steps, and another one, which nothing clips, makes 100 steps with its parameters, the last of
    these warns.

    """
    # These import PyTorch.
    from gradclip._src.step.engines import attach_to_engine
    from gradclip._src.step.optimizers import attach

    asked = Asked(fused, scope, eps, unit_axis, ord, nonfinite, process_group, mesh, where, integers)
    by_engine = attach_to_engine(optimizer, max_norm, asked, monitor)
    return attach(optimizer, max_norm, asked, monitor) if by_engine is None else by_engine


@public
@with_advice
def clip_update_at_step(optimizer: Steps, max_rms: Threshold = 1.0) -> UpdateClipping:
    """Make each step of a PyTorch optimizer clip the update of each parameter, instead of its gradient.

    An update is what the step changes: the parameter afterwards minus the parameter before. Its RMS is its norm divided
    by the square root of its number of elements. An update is multiplied by min(1, max_rms * lr / RMS), where lr is the
    learning rate of its group. So a step moves a parameter by at most `max_rms * lr`, as an RMS, whatever the gradient.

    Adam divides by the root of a mean of past squares. If gradients grow after a quiet time, that mean is still small,
    and the update is large though no gradient is. Adafactor (Shazeer and Stern 2018, section 6) clips the update by its
    RMS. StableAdamW (Wortsman et al. 2023) divides the learning rate by max(1, RMS(g / sqrt(v))), and so estimates the
    RMS before momentum. Here the update itself is measured, with momentum and decoupled weight decay, by any optimizer.
    The usual `max_rms` is 1: Adam's update has an RMS below that as long as its gradients keep their size.

    Args:
        optimizer: as in `gradclip.clip_at_step`, whose clipping of gradients may be attached to it as well.
        max_rms: the bound in units of the learning rate, >= 0; `math.inf` clips nothing.

    Returns:
        A handle: read `.rms`, the largest RMS of the last step before clipping, in units of the learning rate; assign
        `.max_rms`; log `.numbers()`; call `.remove()` to stop, or use it in a `with`.

    Raises:
        TypeError: `optimizer` is no optimizer of PyTorch, or a training engine; LBFGS, ASGD or a schedule-free
            optimizer, which keep in their state what updates have made of the parameters.
        ValueError: the updates of this optimizer are clipped already; a group has no "lr"; `differentiable=True`;
            parameters are shards of FSDP1. `lr` or `max_rms` is negative or NaN.

    The bound is exact: the stored parameter minus the one before, computed without rounding, has an RMS of at most
    `max_rms * lr`, in any dtype. To hold it, the sum is rounded toward the parameter before. In a half type, a short
    update may so be lost, as it may without clipping.

    - An update below 0.99999 of the bound stays as the optimizer made it, bit by bit. So does one with NaN or infinity:
      to skip such steps, use `gradclip.clip_at_step` with `nonfinite="skip"`.
    - The optimizer's state is that of an unclipped step, and its `state_dict` gets nothing more.
    - The parameters are copied before the step. Optimizers of `torch.optim`, with `foreach` and `fused` too, step some
      after the others: 4 MiB at a time or one larger parameter, on an accelerator 256 MiB. Only these are copied, on
      the host into memory that is kept for the next step. For all other optimizers, subclasses of these included, and
      where several parameters have the same memory, all trainable parameters are. Some optimizers hold copies of
      parameters of their own, as Lookahead does: these stay.
    - The learning rate is "lr" of the group. For optimizers that take 1 there and find a rate themselves, such as
      Prodigy, the bound does not follow what they find.
    - DTensors (FSDP2, tensor parallelism) count as a whole, and all processes must step together. A plain tensor is one
      parameter, whatever part of a layer it is.
    - A compiled step runs uncompiled. Nothing waits for an accelerator.

    In optax, `optax.clip_by_block_rms(max_rms)`, or that of `gradclip.integrations.optax`, does the same before the
    learning rate: `optax.chain(optax.scale_by_adam(), clip_by_block_rms(1.0), optax.scale_by_learning_rate(lr))`. Put
    `optax.add_decayed_weights` before it, and weight decay counts as here.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> clipping = clip_update_at_step(optimizer, max_rms=1.0)
    >>> weight.grad = torch.tensor([1.0, 7.0])
    >>> optimizer.step()
    >>> clipping.rms, weight.detach()
    (tensor(5.), tensor([-0.1000, -0.7000]))

    """
    from gradclip._src.step.update import attach_to_updates  # imports PyTorch

    return attach_to_updates(optimizer, max_rms)
