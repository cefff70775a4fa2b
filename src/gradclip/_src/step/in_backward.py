"""Clip each PyTorch gradient as soon as the backward pass finishes it, for optimizers that step within that pass."""

import math
import sys
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch

from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.step.backward_hooks import ClippedInBackward, Shares, hook_of
from gradclip._src.words import listed, with_advice
from gradclip.typing import Ord, Parameters, Policy, Threshold


@with_advice
def clip_in_backward(
    parameters: torch.nn.Module | Parameters,
    max_norm: Threshold | Mapping[str, Threshold],
    ord: Ord | Order = 2,
    *,
    nonfinite: Policy = "propagate",
) -> ClippedInBackward:
    """Make the backward pass clip the gradient of each parameter as soon as it is finished.

    The threshold of parameter k is max_norm * (D_k / D)**(1 / ord): D_k is its number of elements, D that of all
    parameters. So the global norm of all gradients is at most `max_norm`, although they need not exist at the same
    time.

    Args:
        parameters: a module, or its parameters as `gradclip.clip_grad_norm_` accepts them. Frozen parameters have no
            share, and get one when you unfreeze them. A parameter listed twice counts once. If names occur twice, the
            second "w" is called "w (2)". Pass the module rather than a list: only then are parameters noticed that are
            added or replaced.
        max_norm: the threshold of the global norm, or a dict with one threshold per parameter, by name. Frozen
            parameters need none.
        ord: which norm, as in `gradclip.global_norm`, except `-inf`.
        nonfinite: "propagate", "raise", "zero" or "skip", applied to each parameter separately.

    Returns:
        A `ClippedInBackward`: `.norms` has the norms before clipping and `.thresholds` the thresholds, both by name.
        Call `.remove()` to stop.

    Raises:
        ValueError: no parameter requires a gradient; a parameter is computed from others, or already has hooks that run
            after its gradient is accumulated; names do not match; a threshold is negative or NaN.
        TypeError: a parameter is not a tensor, or thresholds by name are given for parameters without names.
        FloatingPointError: in the backward pass with `nonfinite="raise"`, a gradient contains NaN or infinity.
        RuntimeError: in a backward pass with `create_graph=True`, or of a parameter that was frozen and has no
            threshold by name; in a forward pass of the module, if parameters have been added, or replaced, as
            `load_state_dict(assign=True)` and `fully_shard` do.

    You may call this again, also while optimizers step in the backward pass: the last call counts. It clips what is new
    as well, and takes the other parameters over.

    Call this before anything that makes optimizers step in the backward pass: hooks run in the order of registration.
    With optimizers like that, `clip_grad_norm_` after the pass is too late: no gradients are left.

    The bound of each gradient is that of `gradclip.clip_grad_norm_`, and the thresholds, each to the power ord, add up
    to at most max_norm**ord in exact arithmetic. If gradients accumulate over several passes, each pass clips the sum
    so far. With DistributedDataParallel, each process clips its own gradients before they are averaged.

    This uses `torch.Tensor.register_post_accumulate_grad_hook` of PyTorch 2.13.

    >>> import torch
    >>> model = torch.nn.ParameterDict({"v": torch.ones(2), "w": torch.ones(2)})
    >>> clipping = clip_in_backward(model, {"v": 1.0, "w": 5.0})
    >>> x = torch.tensor([3.0, 4.0])
    >>> (model["v"] @ x + model["w"] @ x).backward()
    >>> model["v"].grad, model["w"].grad, clipping.norms["v"]
    (tensor([0.6000, 0.8000]), tensor([3., 4.]), tensor(5.))

    """
    order, _ = Order.parse(ord), Nonfinite.named(nonfinite)
    if order.p < 0:
        raise ValueError("ord must not be -inf: clipping parts by it does not bound the global norm. Pass 2, 1 or inf.")
    module = parameters if isinstance(parameters, torch.nn.Module) else None
    by_name, named = _found(parameters)
    if isinstance(max_norm, Mapping) and not named:
        raise TypeError("thresholds by name need named parameters. Pass the model, or model.named_parameters().")
    by = _given(_checked_names(max_norm, by_name)) if isinstance(max_norm, Mapping) else _shared(max_norm, order)
    return ClippedInBackward(by_name, by, order, nonfinite, module)


def _given(max_norms: Mapping[str, float]) -> Shares:
    return lambda sizes: {name: max_norms[name] for name in sizes if name in max_norms}


def _shared(max_norm: Threshold, order: Order) -> Shares:
    number = _number(max_norm)
    return lambda sizes: shares(number, sizes, order.p)


def shares(max_norm: float, sizes: Mapping[str, int], p: float) -> dict[str, float]:
    """Return thresholds for parts of these sizes; each to the power p, they add up to at most `max_norm` to that power.

    Each is lowered by 2**-48, relatively. The quotient, the root and the product err by far less. The step down covers
    the rounding below the normal range.
    """
    if math.isinf(p) or math.isinf(max_norm) or len(sizes) == 1:
        return dict.fromkeys(sizes, max_norm)
    whole = max(1, sum(sizes.values()))
    each = {name: max_norm * ((size / whole) ** (1.0 / p) * (1.0 - 2.0**-48)) for name, size in sizes.items()}
    return {name: math.nextafter(share, 0.0) for name, share in each.items()}


def _found(parameters: torch.nn.Module | Parameters) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the parameters by name, without duplicates, and whether they came with names."""
    if isinstance(parameters, torch.nn.Module):
        _reshard(parameters)
        parameters = dict(parameters.named_parameters())
    params = ParameterList.of(parameters)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for index, parameter in enumerate(params.parameters):
        name = params.name(index)
        _check(parameter, name)
        if id(parameter) not in seen:
            found[_free(name, found)] = parameter
            seen.add(id(parameter))
    if not any(one.requires_grad for one in found.values()):
        raise ValueError(
            "no parameter requires a gradient, so the backward pass has nothing to clip. Pass parameters with "
            "requires_grad=True, such as model.parameters()."
        )
    return found, bool(params.names) and None not in params.names


def _reshard(module: torch.nn.Module) -> None:
    """Let FSDP2 put back the sharded parameters, which get the gradients, in place of those it gathered to compute."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return the name, with a number if another parameter already has it."""
    numbered = (name if number == 1 else f"{name} ({number})" for number in count(1))
    return next(one for one in numbered if one not in taken)


def _check(parameter: Any, name: str) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is of type {type(parameter).__name__}. Only PyTorch tensors have a backward pass.")
    if not parameter.is_leaf:
        raise ValueError(
            f"{name} is computed from other tensors, so no gradient accumulates in it. Pass the tensors it is computed "
            "from."
        )
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    others = not all(getattr(hook, "only_watches", False) for hook in hooks)
    if others and parameter.requires_grad and hook_of(parameter) is None:
        raise ValueError(
            f"{name} already has hooks that run after its gradient is accumulated. If one steps an optimizer, it would "
            "do so before the gradient is clipped. Call clip_in_backward before registering other hooks."
        )


def _checked_names(max_norm: Mapping[str, Threshold], parameters: Mapping[str, torch.Tensor]) -> dict[str, float]:
    missing, unknown = (
        sorted({name for name, one in parameters.items() if one.requires_grad} - max_norm.keys()),
        sorted(map(str, max_norm.keys() - parameters.keys())),
    )
    if missing or unknown:
        told = [f"none for {listed(missing)}"] * bool(missing) + [f"one for {listed(unknown)}"] * bool(unknown)
        raise ValueError(
            f"max_norm must have a threshold for each parameter that requires a gradient, got {' and '.join(told)}. "
            "To leave a parameter unclipped, pass math.inf."
        )
    return {name: _number(max_norm[name], f"max_norm[{name!r}]") for name in parameters if name in max_norm}


def _number(threshold: Threshold, name: str = "max_norm") -> float:
    number = check_threshold(threshold, name)
    # Read the value of a scalar array now, once, not at each backward pass.
    return number if isinstance(number, float) else float(check_threshold(number.item(), name))
