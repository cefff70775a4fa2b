"""Clipping in place: the gradients of parameters, objects that carry one in `.grad`, or a tree of NumPy arrays.

Everything is checked and decided before the first element is written. A gradient that several parameters share
counts, and is scaled, once.
"""

from dataclasses import replace
from typing import Any

from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.clip import check_real, norm_dtype
from gradclip.coefficient import check_threshold, from_norm, known_threshold
from gradclip.decision import Clipping, decide
from gradclip.gradients import Gradients
from gradclip.norms import Order, measure
from gradclip.policy import check_policy


def grad_norm(parameters: Any, ord: Any = 2) -> Any:
    """Return the norm of the gradients of `parameters` together, without changing them.

    Args:
        parameters: an iterable of objects with a `.grad`, or one such object; or a tree of NumPy arrays, the gradients
            themselves. A `.grad` of None is skipped, and a gradient that occurs twice counts once.
        ord: which norm, as in `gradclip.global_norm`.

    Returns:
        A scalar of the gradients' framework on the first one's device: float64 if one is float64, else float32.

    Raises:
        TypeError: something without `.grad`. ValueError: gradients instead of parameters, an exhausted generator.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(grad_norm([layer]))
    5.0

    """
    order = Order.parse(ord)
    gradients = Gradients.of(parameters)
    backend = gradients.backend()
    with backend.precision():
        arrays = gradients.enter(backend)
        norm = measure(backend, arrays, order)
        return _scalar(backend, norm.product(), arrays, gradients)


def clip_grad_norm_(parameters: Any, max_norm: Any, ord: Any = 2, *, nonfinite: str = "propagate") -> Any:
    """Scale the gradients of `parameters` in place by min(1, max_norm / norm); their norm is then at most `max_norm`.

    Args:
        parameters: as in `grad_norm`. The gradients are written where they lie; one that cannot be written (a JAX
            array, a read-only or expanded one) is replaced in its `.grad`. NumPy arrays passed themselves must be
            writable.
        max_norm: the threshold, >= 0, in the units of the gradients; `inf` clips nothing.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: "propagate", "raise", "zero" or "skip", as in `gradclip.clip_by_global_norm`.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Raises:
        TypeError: something without `.grad`, a gradient of integers. ValueError: a negative or NaN `max_norm`, an
        unknown `ord` or policy, gradients instead of parameters, an exhausted generator, a read-only array that
        nothing holds. FloatingPointError: under "raise". In every case the gradients are as they were.

    Nothing is written where the norm is at most `max_norm`. On an accelerator the call waits for nothing, unless
    `nonfinite="raise"`, and so always writes.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(clip_grad_norm_([layer], max_norm=1.0)), layer.grad.round(6).tolist()
    (5.0, [0.6, 0.8])
    >>> update = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}
    >>> float(clip_grad_norm_(update, max_norm=6.5)), update["b"].round(6).tolist()
    (13.0, [6.0])

    """
    clipping = Clipping(check_threshold(max_norm), Order.parse(ord), check_policy(nonfinite))
    gradients = Gradients.of(parameters)
    gradients.check_writable()
    backend = gradients.backend(clipping.max_norm)
    clipping = replace(clipping, max_norm=known_threshold(backend, clipping.max_norm))
    with backend.precision():
        arrays = gradients.enter(backend)
        made = decide(backend, arrays, clipping, gradients.names)
        norm = _scalar(backend, made.norm.product(), arrays, gradients)
        gradients.replace(backend.update(gradients.grads, arrays, made.arrays, made.coefficient))
    return norm


def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any) -> None:
    """Scale the gradients of `parameters` in place by min(1, max_norm / total_norm), for a norm known already.

    Args:
        parameters: as in `clip_grad_norm_`.
        max_norm: the threshold, >= 0.
        total_norm: the norm the gradients count as having: a number or a scalar array, trusted to float32 precision.
            The bound holds if the gradients' norm is no larger.

    Raises:
        TypeError, ValueError: as `clip_grad_norm_`; the gradients are as they were.

    """
    threshold = check_threshold(max_norm)
    gradients = Gradients.of(parameters)
    gradients.check_writable()
    backend = gradients.backend(threshold, total_norm)
    threshold = known_threshold(backend, threshold)
    with backend.precision():
        arrays = gradients.enter(backend)
        if arrays:
            chosen = from_norm(backend, total_norm, threshold, arrays)
            gradients.replace(backend.update(gradients.grads, arrays, arrays, chosen))


def clip_grad_value_(parameters: Any, clip_value: Any) -> None:
    """Clamp each element of the gradients of `parameters` in place to [-clip_value, clip_value]; NaN stays.

    Args:
        parameters: as in `clip_grad_norm_`.
        clip_value: the largest magnitude, >= 0. Where a gradient's dtype cannot hold it, the next number toward zero.

    Raises:
        TypeError: a complex gradient, something without `.grad`. ValueError: a negative or NaN `clip_value`, gradients
        instead of parameters, an exhausted generator. In every case the gradients are as they were.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([-3.0, 0.5]))
    >>> clip_grad_value_(layer, 1.0)
    >>> layer.grad.tolist()
    [-1.0, 0.5]

    """
    bound = check_threshold(clip_value, "clip_value")
    gradients = Gradients.of(parameters)
    gradients.check_writable()
    backend = gradients.backend(bound)
    bound = known_threshold(backend, bound, "clip_value")
    with backend.precision():
        arrays = gradients.enter(backend)
        check_real(arrays, gradients.names)
        gradients.replace(backend.update_clamped(gradients.grads, arrays, bound))


def _scalar(backend: Backend, norm: Any, arrays: Arrays, gradients: Gradients) -> Any:
    """Return the norm as a scalar of the framework."""
    return backend.leave_scalar(norm, norm_dtype(arrays), gradients.grads)
