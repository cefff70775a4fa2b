"""Clipping each gradient of PyTorch as the backward pass finishes it, for optimizers that step within that pass."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradclip.arguments import check_threshold
from gradclip.backends.torch.optimizers import with_memory_of_its_own
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order
from gradclip.inplace.clip import clip_grad_norm_
from gradclip.parameters import ParameterList
from gradclip.typing import Ord, Parameters, Policy, Threshold
from gradclip.wording import listed


class ClippedInBackward:
    """Clipping of parameters in the backward pass, until `remove()`.

    Attributes:
        thresholds: the threshold of each parameter, by its name.
        norms: the norm of each gradient before clipping, by the name of its parameter, as of its last backward pass.

    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], thresholds: Mapping[str, float], order: Order, nonfinite: Policy
    ) -> None:
        self.thresholds = thresholds
        self.norms: dict[str, torch.Tensor] = {}
        self._order, self._nonfinite = order, nonfinite
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._clip(name)) for name, parameter in parameters.items()
        ]

    def remove(self) -> None:
        """End it: backward passes leave gradients as they are."""
        for hook in self._hooks:
            hook.remove()

    def _clip(self, name: str) -> Callable[[torch.Tensor], None]:
        def clip(parameter: torch.Tensor) -> None:
            if parameter.grad is not None and parameter.grad.requires_grad:
                raise RuntimeError(
                    f"the gradient of {name} is to be differentiated itself (create_graph=True), which clipping in the "
                    "backward pass would not follow. Call remove(), and gradclip.clip_by_global_norm on the gradients."
                )
            with_memory_of_its_own(parameter)
            # Names are for the error, and cost time.
            given: Parameters = {name: parameter} if self._nonfinite == "raise" else [parameter]
            self.norms[name] = clip_grad_norm_(given, self.thresholds[name], self._order, nonfinite=self._nonfinite)

        return clip


def clip_in_backward(
    parameters: torch.nn.Module | Parameters,
    max_norm: Threshold | Mapping[str, Threshold],
    ord: Ord | Order = 2,
    *,
    nonfinite: Policy = "propagate",
) -> ClippedInBackward:
    """Make the backward pass clip the gradient of each parameter as soon as it is finished.

    The threshold of parameter k is max_norm * (D_k / D)**(1 / ord): D_k is the number of its elements, D that of all.
    So the norm of all gradients together is at most `max_norm`, although they need not all be there at one time.

    Args:
        parameters: a module, or its parameters as `gradclip.clip_grad_norm_` takes them. Those that do not require a
            gradient are left out; a parameter that is listed twice counts once.
        max_norm: the threshold of all together, or a dict with one for each parameter by its name.
        ord: which norm, as in `gradclip.global_norm`, but not `-inf`.
        nonfinite: "propagate", "raise", "zero" or "skip", of each parameter for itself.

    Returns:
        A `ClippedInBackward`: `.norms` holds the norms before clipping, `.thresholds` the thresholds, both by name, and
        `.remove()` ends it.

    Raises:
        ValueError: no parameter that requires a gradient, one that is computed from others, one with hooks already that
        run after its gradient is accumulated, names that do not match, a threshold that is negative or NaN.
        TypeError: what is no tensor, a dict of thresholds for parameters without names. In the backward pass:
        FloatingPointError under "raise"; RuntimeError under `create_graph=True`.

    Call this before whatever makes optimizers step in the backward pass: hooks run in the order in which they were
    registered. Clipping a model whose optimizers do so after the pass, by `clip_grad_norm_`, finds no gradients.

    The bound is that of `gradclip.clip_grad_norm_` for each gradient, and the powers of the thresholds add up to at
    most max_norm**ord in exact arithmetic. Where gradients accumulate over several passes, each pass clips what has
    accumulated so far. Under DistributedDataParallel each process clips its own gradients, before they are averaged.

    The hook is that of `torch.Tensor.register_post_accumulate_grad_hook` in PyTorch 2.13.

    >>> import torch
    >>> model = torch.nn.ParameterDict({"v": torch.ones(2), "w": torch.ones(2)})
    >>> clipping = clip_in_backward(model, {"v": 1.0, "w": 5.0})
    >>> (model["v"] @ torch.tensor([3.0, 4.0]) + model["w"] @ torch.tensor([3.0, 4.0])).backward()
    >>> model["v"].grad, model["w"].grad, clipping.norms["v"]
    (tensor([0.6000, 0.8000]), tensor([3., 4.]), tensor(5.))

    """
    order, _ = Order.parse(ord), Nonfinite.named(nonfinite)
    if order.p < 0:
        raise ValueError("ord must not be -inf: smallest magnitudes of parts say nothing of a norm. Pass 2, 1 or inf.")
    by_name, named = _trained(parameters)
    if isinstance(max_norm, Mapping):
        if not named:
            raise TypeError("thresholds by name need named parameters. Pass the model, or model.named_parameters().")
        thresholds = _checked_names(max_norm, by_name)
    else:
        thresholds = shares(_number(max_norm), {name: p.numel() for name, p in by_name.items()}, order.p)
    return ClippedInBackward(by_name, thresholds, order, nonfinite)


def shares(max_norm: float, sizes: Mapping[str, int], p: float) -> dict[str, float]:
    """Return thresholds for parts of these sizes, the sum of whose powers is at most `max_norm` to that power.

    Each is lowered by 2**-48, relatively. The quotient, the root and the product err by far less, and the step down
    covers what rounding adds below the normal range.
    """
    if math.isinf(p) or math.isinf(max_norm) or len(sizes) == 1:
        return dict.fromkeys(sizes, max_norm)
    whole = max(1, sum(sizes.values()))
    each = {name: max_norm * ((size / whole) ** (1.0 / p) * (1.0 - 2.0**-48)) for name, size in sizes.items()}
    return {name: math.nextafter(share, 0.0) for name, share in each.items()}


def _trained(parameters: torch.nn.Module | Parameters) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the parameters that get gradients, each once, by their names, and whether these were given."""
    if isinstance(parameters, torch.nn.Module):
        parameters = dict(parameters.named_parameters())
    params = ParameterList.of(parameters)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for index, parameter in enumerate(params.parameters):
        name = params.name(index)
        _check(parameter, name)
        if parameter.requires_grad and id(parameter) not in seen:
            found[name] = parameter
            seen.add(id(parameter))
    if not found:
        raise ValueError("no parameter requires a gradient, so that a backward pass has nothing to clip.")
    return found, bool(params.names) and None not in params.names


def _check(parameter: Any, name: str) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is a {type(parameter).__name__}; only tensors of PyTorch have a backward pass.")
    if not parameter.is_leaf:
        raise ValueError(
            f"{name} is computed from other tensors, so that no gradient accumulates in it. Pass those it is computed "
            "from."
        )
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"{name} has hooks already that run after its gradient is accumulated. If one of them makes an optimizer "
            "step, that would step before the gradient is clipped. Call clip_in_backward before these are registered, "
            "or remove() those of an earlier clip_in_backward."
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
            "For a parameter that is not to be clipped write math.inf."
        )
    return {name: _number(max_norm[name], f"max_norm[{name!r}]") for name in parameters}


def _number(threshold: Threshold, name: str = "max_norm") -> float:
    number = check_threshold(threshold, name)
    # A scalar array, whose value is wanted now: once, not at each backward pass.
    return number if isinstance(number, float) else float(check_threshold(number.item(), name))
