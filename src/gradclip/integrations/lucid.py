"""Drop-in replacements for the clipping functions of `lucid.nn.util`.

To switch, write `from gradclip.integrations.lucid import clip_grad_norm`. A parameter is any object whose `.grad` is a
NumPy array (as in Lucid), a PyTorch tensor, a JAX array, or an MLX array (on Lucid's device "gpu").

What differs from Lucid: the bound holds exactly, gradients are changed in place, and norms do not overflow. MLX arrays
cannot be changed in place. The CPU waits for them, clips them and replaces them.
"""

import math
import numbers
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gradclip._src.annotations import HasGrad, Ord, Parameters, Scalar
from gradclip._src.core.norms import Order
from gradclip._src.inplace import norm as in_place
from gradclip._src.inplace import norm as inplace
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.parameters import checked_list
from gradclip._src.words import with_advice

__all__ = ["clip_grad_norm", "clip_grad_value", "grad_norm"]


@with_advice
def grad_norm(parameters: Parameters, norm_type: Ord = 2) -> Scalar:
    """Return the global norm of the gradients of `parameters`.

    For Lucid parameters it is a Lucid tensor, otherwise a scalar of the gradients' framework.

    Args:
        parameters: one parameter or an iterable of parameters. A `.grad` of None is skipped.
        norm_type: a number >= 1, inf or -inf.

    Errors are those of `gradclip.grad_norm`. The signature is that of lucid-dl 2.7.
    """
    listed = checked_list(parameters)
    return _as_lucid(inplace.grad_norm(_Holders(listed).holders, _order(norm_type), integers="raise"), listed)


@with_advice
def clip_grad_norm(parameters: Parameters, max_norm: float, norm_type: Ord = 2, eps: float = 1e-7) -> Scalar:
    """If norm > max_norm, scale the gradients of `parameters` in place by max_norm / (norm + float(eps)).

    Args:
        parameters: one parameter or an iterable of parameters. A `.grad` of None is skipped.
        max_norm: the threshold, >= 0, in the units of the gradients.
        norm_type: a number >= 1, inf or -inf.
        eps: added to the norm before dividing, >= 0.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Errors are those of `gradclip.clip_grad_norm_`. The signature is that of lucid-dl 2.7.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(clip_grad_norm([layer], max_norm=1.0)), layer.grad.round(6).tolist()
    (5.0, [0.6, 0.8])
    """
    if not (isinstance(eps, numbers.Real) and eps >= 0):
        raise ValueError(f"eps must be a number >= 0, got {eps!r}. The default is 1e-7.")
    order, threshold = _order(norm_type), check_threshold(max_norm)
    listed = checked_list(parameters)
    arrays = _Holders(listed)
    norm = inplace.grad_norm(arrays.holders, order, integers="raise")
    if threshold < float(norm) < math.inf:
        threshold *= float(norm) / (float(norm) + float(eps))
    norm = inplace.clip_grad_norm_(arrays.holders, threshold, order, integers="raise")
    arrays.replace_mlx()
    return _as_lucid(norm, listed)


@with_advice
def clip_grad_value(parameters: Parameters, clip_value: float) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value].

    Errors are those of `gradclip.clip_grad_value_`. The signature is that of lucid-dl 2.7.
    """
    arrays = _Holders(checked_list(parameters))
    in_place.clip_grad_value_(arrays.holders, clip_value, integers="raise")
    arrays.replace_mlx()


def _order(norm_type: object) -> Order:
    return Order.parse(norm_type, "norm_type")


class _Holders:
    """The parameters to clip. Gradients that are Lucid tensors or MLX arrays are wrapped as NumPy arrays."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._mlx: Any = sys.modules.get("mlx.core")
        self._seen: dict[int, np.ndarray] = {}
        self._replaceable: list[tuple[Any, str, Any]] = []
        each = {id(parameter): parameter for parameter in parameters}  # one listed twice counts once
        self.holders = list(map(self._holder, each.values()))

    def _holder(self, parameter: HasGrad) -> HasGrad:
        lucid = sys.modules.get("lucid")
        inner = lucid is not None and isinstance(parameter.grad, lucid.Tensor)
        owner, name = (parameter.grad, "data") if inner else (parameter, "grad")
        array = getattr(owner, name)
        if self._mlx is not None and isinstance(array, self._mlx.array):
            holder = SimpleNamespace(grad=self._view(array))
            self._replaceable.append((owner, name, holder))
            return holder
        return SimpleNamespace(grad=array) if inner else parameter

    def _view(self, array: Any) -> np.ndarray:
        """Return a read-only NumPy view of an MLX array. Parameters that share the array share the view."""
        if id(array) not in self._seen:
            self._seen[id(array)] = np.asarray(array)
            self._seen[id(array)].flags.writeable = False
        return self._seen[id(array)]

    def replace_mlx(self) -> None:
        """Write clipped gradients back to their parameters as new MLX arrays."""
        views = set(map(id, self._seen.values()))
        made: dict[int, Any] = {}
        for owner, name, holder in self._replaceable:
            new = holder.grad
            if id(new) not in views:
                made.setdefault(id(new), self._mlx.array(new, dtype=getattr(owner, name).dtype))
                setattr(owner, name, made[id(new)])


def _as_lucid(norm: Scalar, parameters: Sequence[Any]) -> Scalar:
    lucid = sys.modules.get("lucid")
    if lucid is None or not (parameters and isinstance(parameters[0], lucid.Tensor)):
        return norm
    return lucid.Tensor(float(norm), device=parameters[0].device)
