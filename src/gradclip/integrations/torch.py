"""Drop-in replacements for the clipping functions of `torch.nn.utils`.

To switch, write `from gradclip.integrations.torch import clip_grad_norm_`. What differs from PyTorch:

- The result's norm never exceeds `max_norm`, even by rounding.
- If nothing needs clipping, nothing is written on the CPU.
- Norms do not overflow, and are returned in float32 or wider.
- An infinity in a gradient turns all gradients into NaN. In PyTorch, finite elements become zero, except with
  `norm_type=-inf`.
- A negative `max_norm` is an error.
- A call that could only do nothing is an error: gradients passed instead of parameters, or a generator that an
  earlier loop has used up. For the generator, `clip_grad_norm_` only warns, as in PyTorch.
- A call with parameters of which none has a gradient warns.
- `foreach` is accepted and ignored.

`clip_in_backward` is new: it clips during the backward pass, for optimizers that step there.

`poisson_loader` makes a `DataLoader` of private training from a data set and a `gradclip.PoissonBatches`. It is a
`DataLoader` of a `MaskedDataset` with a `PoissonSampler`.
"""

import contextlib
import math
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gradclip._src.annotations import Parameters, Policy
from gradclip._src.backends import any_distributed
from gradclip._src.backends.imported import needed_for
from gradclip._src.core.nonfinite import TO_GO_ON
from gradclip._src.core.norms import Order
from gradclip._src.distributed.processes import telling
from gradclip._src.functional.clip import global_norm
from gradclip._src.inplace import norm as in_place
from gradclip._src.inplace import norm as inplace
from gradclip._src.inplace.groups import several_norms
from gradclip._src.passed.arguments import check_flag, check_threshold
from gradclip._src.passed.leaves import without_integers
from gradclip._src.passed.parameters import ParameterList
from gradclip._src.words import no_attribute, with_advice

with needed_for("torch", "torch"):
    import torch

    from gradclip._src.backends.torch.tensors import tensor_of
    from gradclip._src.step.in_backward import (
        NotClipped,  # noqa: F401  # pickles name it here
        clip_in_backward,
    )
    from gradclip.integrations._torch_batches import (
        MaskedDataset,
        Place,  # noqa: F401  # pickles name it here
        PoissonSampler,
        poisson_loader,
    )

__all__ = [
    "MaskedDataset",
    "PoissonSampler",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "clip_in_backward",
    "get_total_norm",
    "poisson_loader",
]


@with_advice
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the gradients of `parameters` in place by their global norm. Return the norm before clipping.

    Distributed tensors (DTensor) work. Their norm is a plain scalar tensor, equal on every rank.

    Args:
        parameters: one parameter or an iterable of parameters. Those with no `.grad` are skipped.
        max_norm: the threshold, >= 0, in the units of the gradients.
        norm_type: the order of the norm: any number > 0, "inf" or inf, "-inf" or -inf.
        error_if_nonfinite: raise an error if a gradient holds NaN or an infinity. If False, such a gradient turns all
            gradients into NaN.
        foreach: ignored.

    Raises:
        RuntimeError: a gradient is non-finite and `error_if_nonfinite` is set. The message names the gradients.
        UserWarning: `parameters` is an empty generator, for example one that an earlier loop has used up.
        Other errors are those of `gradclip.clip_grad_norm_`.

    The signature is that of `torch.nn.utils.clip_grad_norm_` in PyTorch 2.13.

    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> parameter.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_(parameter, max_norm=1.0), parameter.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    listed = _listed(parameters)
    order = _checked(listed, norm_type, error_if_nonfinite, max_norm)
    policy: Policy = "raise" if error_if_nonfinite else "propagate"
    with _runtime_errors(norm_type):
        norm = inplace.clip_grad_norm_(listed, max_norm, order, nonfinite=policy, integers="raise")
    return tensor_of(norm)


@with_advice
def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value].

    The signature is that of `torch.nn.utils.clip_grad_value_`. `foreach` is ignored. Errors are those of
    `gradclip.clip_grad_value_`.

    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> parameter.grad = torch.tensor([-3.0, 0.5])
    >>> clip_grad_value_(parameter, clip_value=1.0)
    >>> parameter.grad
    tensor([-1.0000,  0.5000])
    """
    in_place.clip_grad_value_(parameters, clip_value, integers="raise")


@with_advice
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the global norm of `tensors`, taken as one vector, as a scalar tensor.

    Args:
        tensors: one tensor or an iterable of tensors: the gradients, not the parameters.
        norm_type: as in `clip_grad_norm_`.
        error_if_nonfinite: raise a RuntimeError if the norm is NaN or infinite.
        foreach: ignored.

    The signature is that of `torch.nn.utils.get_total_norm`.

    >>> get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    listed = _tensors(tensors)
    holders = [types.SimpleNamespace(grad=tensor) for tensor in listed] if any_distributed(listed) else []
    order = _checked(holders, norm_type, error_if_nonfinite)
    with torch.no_grad():
        if holders:
            norm = inplace.grad_norm(holders, order, integers="raise")
        else:
            norm = tensor_of(global_norm(without_integers(listed), order))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients is {norm.item()}. Look for NaN and infinities "
            "in the gradients, or pass error_if_nonfinite=False."
        )
    return norm


@with_advice
def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale the gradients of `parameters` in place by min(1, max_norm / total_norm).

    If `total_norm` is at least the gradients' norm, the result's norm is at most `max_norm`, up to float32 rounding.
    The signature is that of `torch.nn.utils.clip_grads_with_norm_`. `foreach` is ignored.

    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> parameter.grad = torch.tensor([3.0, 4.0])
    >>> clip_grads_with_norm_(parameter, 1.0, torch.tensor(5.0))
    >>> parameter.grad
    tensor([0.6000, 0.8000])
    """
    in_place.clip_grads_with_norm_(parameters, max_norm, total_norm, integers="raise")


def order_of(norm_type: float | str) -> Order:
    """Parse PyTorch's `norm_type`: any number > 0, or plus or minus infinity."""
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = 0.0
    if p > 0 or p == -torch.inf:
        return Order(p)
    raise ValueError(f"norm_type must be a number > 0, 'inf' or '-inf', got {norm_type!r}. The default is 2.0.")


def _checked(
    parameters: Parameters, norm_type: float | str, error_if_nonfinite: bool, max_norm: object = math.inf
) -> Order:
    """Return the order of the norm. Errors also reach the other processes that hold parts of the parameters."""
    try:
        if several_norms(parameters, max_norm):  # PyTorch has none
            ParameterList.of(parameters)
            check_threshold(max_norm)
        check_flag("error_if_nonfinite", error_if_nonfinite)
        return order_of(norm_type)
    except Exception:
        with telling(parameters, None, None):
            raise


def _tensors(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"tensors must be a tensor or an iterable of tensors, got {type(tensors).__name__}. Pass the gradients: "
            "[p.grad for p in model.parameters() if p.grad is not None]. For a dict, pass its values()."
        )
    return list(tensors)


def _listed(parameters: Parameters) -> Parameters:
    if not isinstance(parameters, types.GeneratorType):
        return parameters
    listed = list(parameters)
    if not listed:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=4)
    return listed


if not TYPE_CHECKING:  # or a misspelt name would be right to type checkers

    def __getattr__(name: str) -> Any:
        """Say what to use instead of a name that is not here."""
        raise no_attribute(name, sys.modules[__name__])

    # For `from ... import`: Python looks for the missing names of packages alone as modules, which ends with advice.
    __path__: list[str] = []


@contextlib.contextmanager
def _runtime_errors(norm_type: float | str) -> Iterator[None]:
    try:
        yield
    except FloatingPointError as error:
        order = float(norm_type)
        told = str(error).replace(TO_GO_ON, "To go on, skip this step.")
        raise RuntimeError(f"The total norm of order {order} for gradients is not finite: {told}") from None
