"""The names of `lucid.nn.util`, on gradclip's engine.

Switch by writing `from gradclip.integrations.lucid import clip_grad_norm`. A parameter is any object whose `.grad` is a
NumPy array (as in Lucid), a PyTorch tensor or a JAX array. What differs: the bound holds exactly, gradients are
written where they lie, and norms do not overflow.
"""

import math
import numbers
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gradclip import inplace
from gradclip.arguments import check_threshold
from gradclip.members import checked_list

__all__ = ["clip_grad_norm", "clip_grad_value", "grad_norm"]


def grad_norm(parameters: Any, norm_type: float | str = 2) -> Any:
    """Return the norm of the gradients of `parameters`: a Lucid tensor for Lucid's, else their framework's scalar.

    Args:
        parameters: an iterable of parameters, or one; a `.grad` of None is skipped.
        norm_type: a number >= 1, inf or -inf.

    Errors are those of `gradclip.grad_norm`; the signature is that of lucid-dl 2.7.
    """
    listed = checked_list(parameters)
    return _as_lucid(inplace.grad_norm(_with_arrays(listed), norm_type), listed)


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float | str = 2, eps: float = 1e-7) -> Any:
    """Scale the gradients of `parameters` in place by max_norm / (norm + float(eps)) where norm > max_norm.

    Args:
        parameters: an iterable of parameters, or one; a `.grad` of None is skipped.
        max_norm: the threshold, >= 0, in the units of the gradients.
        norm_type: a number >= 1, inf or -inf.
        eps: added to the norm before dividing, >= 0.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Errors are those of `gradclip.clip_grad_norm_`; the signature is that of lucid-dl 2.7.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(clip_grad_norm([layer], max_norm=1.0)), layer.grad.round(6).tolist()
    (5.0, [0.6, 0.8])
    """
    if not (isinstance(eps, numbers.Real) and eps >= 0):
        raise ValueError(f"eps must be a number >= 0, got {eps!r}. The usual one is 1e-7.")
    listed = checked_list(parameters)
    arrays = _with_arrays(listed)
    threshold = check_threshold(max_norm)
    norm = float(inplace.grad_norm(arrays, norm_type))
    if threshold < norm < math.inf:
        threshold *= norm / (norm + float(eps))
    return _as_lucid(inplace.clip_grad_norm_(arrays, threshold, norm_type), listed)


def clip_grad_value(parameters: Any, clip_value: float) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value].

    Errors are those of `gradclip.clip_grad_value_`; the signature is that of lucid-dl 2.7.
    """
    inplace.clip_grad_value_(_with_arrays(checked_list(parameters)), clip_value)


def _with_arrays(parameters: Sequence[Any]) -> Sequence[Any]:
    """Return the parameters; in place of one whose `.grad` is itself a Lucid tensor, the holder of its array."""
    lucid = sys.modules.get("lucid")
    if lucid is None:
        return parameters
    return [SimpleNamespace(grad=p.grad.data) if isinstance(p.grad, lucid.Tensor) else p for p in parameters]


def _as_lucid(norm: Any, parameters: Sequence[Any]) -> Any:
    lucid = sys.modules.get("lucid")
    if lucid is None or not (parameters and isinstance(parameters[0], lucid.Tensor)):
        return norm
    return lucid.Tensor(float(norm), device=parameters[0].device)
