"""Clipping in place, over parameters: objects that carry a gradient in `.grad`.

Everything is checked and decided before the first element is written. A gradient that several parameters share
counts, and is scaled, once.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gradclip.backends import Backend, find, framework_of
from gradclip.clip import check_real, norm_dtype
from gradclip.coefficient import check_threshold, from_norm, known_threshold
from gradclip.decision import Clipping, decide
from gradclip.norms import Order, measure
from gradclip.policy import check_policy


def grad_norm(parameters: Any, ord: Any = 2) -> Any:
    """Return the norm of the gradients of `parameters` together, without changing them.

    Args:
        parameters: an iterable of objects with a `.grad`, or one such object. A `.grad` of None is skipped, and a
            gradient that occurs twice counts once.
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
        return gradients.scalar(backend, norm.product(), arrays)


def clip_grad_norm_(parameters: Any, max_norm: Any, ord: Any = 2, *, nonfinite: str = "propagate") -> Any:
    """Scale the gradients of `parameters` in place by min(1, max_norm / norm); their norm is then at most `max_norm`.

    Args:
        parameters: as in `grad_norm`. The gradients are written where they lie; one that cannot be written (a JAX
            array, a read-only or expanded one) is replaced in its `.grad`.
        max_norm: the threshold, >= 0, in the units of the gradients; `inf` clips nothing.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: "propagate", "raise", "zero" or "skip", as in `gradclip.clip_by_global_norm`.

    Returns:
        The norm before clipping, as `grad_norm` returns it.

    Raises:
        TypeError: something without `.grad`, a gradient of integers. ValueError: a negative or NaN `max_norm`, an
        unknown `ord` or policy, gradients instead of parameters, an exhausted generator. FloatingPointError: under
        "raise". In every case the gradients are as they were.

    Nothing is written where the norm is at most `max_norm`. On an accelerator the call waits for nothing, unless
    `nonfinite="raise"`, and so always writes.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> layer = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> float(clip_grad_norm_([layer], max_norm=1.0)), layer.grad.round(6).tolist()
    (5.0, [0.6, 0.8])

    """
    clipping = Clipping(check_threshold(max_norm), Order.parse(ord), check_policy(nonfinite))
    gradients = Gradients.of(parameters)
    backend = gradients.backend(clipping.max_norm)
    clipping = replace(clipping, max_norm=known_threshold(backend, clipping.max_norm))
    with backend.precision():
        arrays = gradients.enter(backend)
        made = decide(backend, arrays, clipping, gradients.names)
        norm = gradients.scalar(backend, made.norm.product(), arrays)
        gradients.update(lambda leaf, x, new: backend.update(leaf, x, new, made.coefficient), arrays, made.arrays)
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
    backend = gradients.backend(threshold, total_norm)
    threshold = known_threshold(backend, threshold)
    with backend.precision():
        arrays = gradients.enter(backend)
        if arrays:
            chosen = from_norm(backend, total_norm, threshold, arrays)
            gradients.update(lambda leaf, x, new: backend.update(leaf, x, new, chosen), arrays, arrays)


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
    backend = gradients.backend(bound)
    bound = known_threshold(backend, bound, "clip_value")
    with backend.precision():
        arrays = gradients.enter(backend)
        check_real(arrays, gradients.names)
        gradients.update(lambda leaf, x, _: backend.update_clamped(leaf, x, bound), arrays, arrays)


@dataclass(frozen=True)
class Gradients:
    """The gradients of some parameters, each once, with the parameters that hold it."""

    parameters: list[Any]
    grads: list[Any]
    holders: list[list[int]]

    @classmethod
    def of(cls, parameters: Any) -> "Gradients":
        """Collect the gradients. Raises where there can be none, so that a mistake is not silent."""
        listed = as_list(parameters)
        places: dict[int, int] = {}
        grads: list[Any] = []
        holders: list[list[int]] = []
        for index, parameter in enumerate(listed):
            grad = parameter.grad
            if grad is None:
                continue
            place = places.setdefault(id(grad), len(grads))
            if place == len(grads):
                grads.append(grad)
                holders.append([])
            holders[place].append(index)
        if not grads:
            _refuse_bare_gradients(listed)
        return cls(listed, grads, holders)

    def names(self) -> list[str]:
        """Return what each gradient is called in an error."""
        return [f"parameters[{holders[0]}].grad" for holders in self.holders]

    def backend(self, *scalars: Any) -> Backend:
        """Return the backend of the gradients, or of the parameters where none has a gradient."""
        leaves = self.grads or [p for p in self.parameters[:1] if framework_of(p)]
        return find(leaves, self.names, *scalars)

    def enter(self, backend: Backend) -> list[Any]:
        """Return the arrays of the gradients, which share their memory. Raises TypeError for integers."""
        return [
            backend.enter(backend.prepare_in_place(grad, name))
            for grad, name in zip(self.grads, self.names(), strict=True)
        ]

    def scalar(self, backend: Backend, norm: Any, arrays: list[Any]) -> Any:
        """Return the norm as a scalar of the framework."""
        return backend.leave_scalar(norm, norm_dtype(arrays), self.grads)

    def update(self, change: Callable[[Any, Any, Any], Any], arrays: list[Any], new: Iterable[Any]) -> None:
        """Apply `change` to each gradient; put what it returns in `.grad` where that is another object."""
        for grad, x, replaced, holders in zip(self.grads, arrays, new, self.holders, strict=True):
            changed = change(grad, x, replaced)
            if changed is not grad:
                for index in holders:
                    self.parameters[index].grad = changed


def as_list(parameters: Any) -> list[Any]:
    """Return the parameters as a list. Raises where there is something else in it, or an exhausted generator."""
    if hasattr(parameters, "grad"):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(
            "parameters must be an iterable of objects with a .grad, or one such object, got "
            f"{type(parameters).__name__}. Pass model.parameters(), or a list of parameters."
        )
    listed = list(parameters)
    for index, parameter in enumerate(listed):
        if not hasattr(parameter, "grad"):
            raise TypeError(
                f"parameters[{index}] is a {type(parameter).__name__}, which has no .grad. Pass the parameters, such "
                "as model.parameters() (not named_parameters()); for a tree of gradients use "
                "gradclip.clip_by_global_norm."
            )
    if not listed and inspect.isgenerator(parameters):
        raise ValueError(
            "parameters is a generator that yields nothing: it was used up by an earlier loop, or the model has no "
            "parameters. Call model.parameters() again, or keep list(model.parameters())."
        )
    return listed


def _refuse_bare_gradients(parameters: list[Any]) -> None:
    for index, parameter in enumerate(parameters):
        if framework_of(parameter) == "torch" and _is_bare_tensor(parameter):
            raise ValueError(
                f"parameters[{index}] is a tensor that has no .grad and needs none: gradients were passed where the "
                "parameters belong. Pass the parameters; to clip gradients themselves use "
                "gradclip.clip_by_global_norm."
            )


def _is_bare_tensor(tensor: Any) -> bool:
    return not tensor.requires_grad and type(tensor).__name__ != "Parameter"
