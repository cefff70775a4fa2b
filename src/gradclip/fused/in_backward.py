"""Clip each PyTorch gradient as soon as the backward pass finishes it, for optimizers that step within that pass."""

import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch

from gradclip.arguments import check_threshold
from gradclip.backends import any_distributed
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order
from gradclip.fused.optimizers import with_memory_of_its_own
from gradclip.inplace import clip_grad_norm_
from gradclip.parameters import ParameterList
from gradclip.typing import Ord, Parameters, Policy, Threshold
from gradclip.words import listed, with_advice


class ClippedInBackward:
    """Clipping of parameters in the backward pass, until `remove()`.

    Attributes:
        thresholds: the threshold of each parameter, by name.
        norms: the norm of each gradient before clipping, by parameter name, from its last backward pass.

    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        thresholds: Mapping[str, float],
        order: Order,
        nonfinite: Policy,
        module: torch.nn.Module | None,
    ) -> None:
        self.thresholds = thresholds
        self.norms: dict[str, torch.Tensor] = {}
        self._order, self._nonfinite = order, nonfinite
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._clip, name))
            for name, parameter in parameters.items()
        ]
        if module is not None:
            self._hooks += _watch(module)

    def remove(self) -> None:
        """Stop clipping: backward passes leave the gradients unchanged."""
        for hook in self._hooks:
            hook.remove()

    def _clip(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {name} has a graph (create_graph=True), but clipping in the backward pass is not "
                "differentiable. Call remove(), and gradclip.clip_by_global_norm on the gradients."
            )
        with_memory_of_its_own(parameter)
        # Only this error needs names, and they cost time.
        given: Parameters = {name: parameter} if self._nonfinite == "raise" else [parameter]
        self.norms[name] = clip_grad_norm_(given, self.thresholds[name], self._order, nonfinite=self._nonfinite)


class _Watch:
    """Called before a module's forward pass: raises if parameters have been replaced by ones that are not clipped."""

    def __init__(self, module: torch.nn.Module, prefix: str, *, deep: bool) -> None:
        owners = module.named_modules(prefix=prefix) if deep else [(prefix, module)]
        self._seen = [
            (f"{path}.{key}".removeprefix("."), weakref.ref(owner), key, weakref.ref(parameter))
            for path, owner in owners
            for key, parameter in _own(owner)
        ]

    def __call__(self, _module: torch.nn.Module, _inputs: Any) -> None:
        # Compiled code cannot run this check.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        replaced = [name for name, owner, key, before in self._seen if _replaced(owner(), key, before())]
        if replaced:
            raise RuntimeError(
                f"{listed(replaced)}: replaced since clip_in_backward was called, so the gradients would not be "
                "clipped. load_state_dict(assign=True), fully_shard and others make new parameters. Call "
                "clip_in_backward after them."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the module, also on disk, are not clipped.
        return _ignore_call, ()


def _ignore_call() -> Any:
    return _ignored


def _ignored(_module: torch.nn.Module, _inputs: Any) -> None:
    """Take the place of a `_Watch` in copies of a module."""


def _watch(root: torch.nn.Module) -> Iterator[Any]:
    """Check all parameters when the module is called, and those of each part when only that is called."""
    for path, module in root.named_modules():
        if module is root or any(_own(module)):
            yield module.register_forward_pre_hook(_Watch(module, path, deep=module is root))


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, p) for key, p in module._parameters.items() if p is not None and p.requires_grad)


def _replaced(owner: torch.nn.Module | None, key: str, old: torch.Tensor | None) -> bool:
    """Say whether a place holds another parameter that trains and that nothing clips."""
    now = None if owner is None else owner._parameters.get(key)
    if now is old or not isinstance(now, torch.nn.Parameter) or not now.requires_grad:
        return False
    # During its forward pass, FSDP2 puts gathered parameters in the place of the sharded ones, which stay clipped.
    gathered = any_distributed([old]) and not any_distributed([now])
    return not (gathered or _is_clipped(now))


def _is_clipped(parameter: torch.Tensor) -> bool:
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return any(isinstance(getattr(getattr(hook, "func", None), "__self__", None), ClippedInBackward) for hook in hooks)


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
        parameters: a module, or its parameters as `gradclip.clip_grad_norm_` accepts them. Parameters that do not
            require a gradient are ignored. A parameter listed twice counts once. If names occur twice, the second "w"
            is called "w (2)". Pass the module rather than a list: only then are replaced parameters noticed.
        max_norm: the threshold of the global norm, or a dict with one threshold per parameter, by name.
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
        RuntimeError: in a backward pass with `create_graph=True`; in a forward pass of the module, if parameters have
            been replaced, as `load_state_dict(assign=True)` and `fully_shard` do.

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
    by_name, named = _trained(parameters)
    if isinstance(max_norm, Mapping):
        if not named:
            raise TypeError("thresholds by name need named parameters. Pass the model, or model.named_parameters().")
        thresholds = _checked_names(max_norm, by_name)
    else:
        thresholds = shares(_number(max_norm), {name: p.numel() for name, p in by_name.items()}, order.p)
    return ClippedInBackward(by_name, thresholds, order, nonfinite, module)


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


def _trained(parameters: torch.nn.Module | Parameters) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the parameters that get gradients by name, without duplicates, and whether they came with names."""
    if isinstance(parameters, torch.nn.Module):
        _reshard(parameters)
        parameters = dict(parameters.named_parameters())
    params = ParameterList.of(parameters)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for index, parameter in enumerate(params.parameters):
        name = params.name(index)
        _check(parameter, name)
        if parameter.requires_grad and id(parameter) not in seen:
            found[_free(name, found)] = parameter
            seen.add(id(parameter))
    if not found:
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
    if not all(getattr(hook, "only_watches", False) for hook in hooks):
        raise ValueError(
            f"{name} already has hooks that run after its gradient is accumulated. If one steps an optimizer, it would "
            "do so before the gradient is clipped. Call clip_in_backward before registering other hooks. If an earlier "
            "clip_in_backward registered them, call its remove()."
        )


def _checked_names(max_norm: Mapping[str, Threshold], parameters: Mapping[str, torch.Tensor]) -> dict[str, float]:
    missing, unknown = (
        sorted(parameters.keys() - max_norm.keys()),
        sorted(map(str, max_norm.keys() - parameters.keys())),
    )
    if missing or unknown:
        told = [f"none for {listed(missing)}"] * bool(missing) + [f"one for {listed(unknown)}"] * bool(unknown)
        raise ValueError(
            f"max_norm must have a threshold for each parameter that requires a gradient, got {' and '.join(told)}. "
            "To leave a parameter unclipped, pass math.inf."
        )
    return {name: _number(max_norm[name], f"max_norm[{name!r}]") for name in parameters}


def _number(threshold: Threshold, name: str = "max_norm") -> float:
    number = check_threshold(threshold, name)
    # Read the value of a scalar array now, once, not at each backward pass.
    return number if isinstance(number, float) else float(check_threshold(number.item(), name))
