"""Checks of user input, made before anything is computed: thresholds, norms, flags and masks."""

import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isfunction
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np

from gradclip._src.annotations import HasDtype, Mask, Thresholds
from gradclip._src.backends.registry import holding_gradients, is_masked, known, number_in, without_values
from gradclip._src.core.announced import announced
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import dtype_name, is_complex
from gradclip._src.core.protocols import Backend
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.words import typed

P = ParamSpec("P")
R = TypeVar("R")

_NO_ORDER = (
    "cannot be clipped by value: complex numbers have no order. Clip it by norm, or clip its real and imaginary parts "
    "separately."
)


def in_place(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function that clips in place compute with subnormal numbers, and announce its calls."""
    return announced(with_subnormals(function))


def check_threshold(value: object, name: str = "max_norm", *, backend: Backend | None = None) -> Any:
    """Return a threshold as a float64, rounded down.

    A scalar array is returned unchanged unless `backend` can read its value. Raises TypeError if it is not a real
    number, and ValueError if it is negative, NaN or beyond float64's range.
    """
    if type(value) is float and value >= 0:
        return value
    too_large = (
        f"{name} must be within float64's range, got a number with about {{digits}} digits. To switch clipping off "
        f"pass {name}=math.inf."
    )
    advice = f"To switch clipping off pass {name}=math.inf." if value is None else f"For example, pass {name}=1.0."
    number = _real(value, name, advice, too_large)
    if not isinstance(number, float):
        return check_threshold(_item(number, name), name) if backend is not None and backend.concrete else number
    if not number >= 0:
        raise ValueError(
            f"{name} must not be negative or NaN, got {value!r}. To switch clipping off pass {name}=math.inf."
        )
    return number


def check_thresholds(values: Sequence[object], backend: Backend) -> list[Any]:
    """Return thresholds, checked likewise."""
    return of_each(partial(check_threshold, backend=backend), values)


def of_each(function: Callable[[Any], Any], thresholds: Sequence[Any]) -> list[Any]:
    """Return a function of each threshold; of one that all layers share, it is computed once."""
    if thresholds and all(one is thresholds[0] for one in thresholds):
        return [function(thresholds[0])] * len(thresholds)
    return list(map(function, thresholds))


def check_norm(value: object, name: str = "total_norm", *, backend: Backend) -> Any:
    """Return a norm as a float; NaN is allowed.

    A scalar array is returned unchanged unless `backend` can read its value. Raises TypeError if it is not a real
    number, and ValueError if it is negative or beyond float64's range.
    """
    advice = "Pass the norm of the gradients, as grad_norm or global_norm returns it."
    must = f"{name} must be non-negative and within float64's range"
    number = _real(value, name, advice, f"{must}, got a number with about {{digits}} digits. {advice}")
    if not isinstance(number, float):
        return check_norm(_item(number, name), name, backend=backend) if backend.concrete else number
    if number < 0:
        raise ValueError(f"{must}, got {value!r}. {advice}")
    return number


def scalar_array(threshold: object) -> Any:
    """Return a checked threshold that is a differentiable scalar array; None if it is a plain number."""
    return None if isinstance(threshold, float | numbers.Real | np.ndarray) else threshold


def check_flag(name: str, value: object) -> bool:
    """Return a flag as a bool. Raises TypeError for anything but True and False."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {typed(value)}.")


def check_mask(mask: Mask) -> Any:
    """Return the mask unchanged: None, or booleans as an array, list or tuple. Raises TypeError for anything else."""
    if mask is None or (is_array(mask) and dtype_name(mask) == "bool" and not is_masked(mask)):
        return mask
    if isinstance(mask, list | tuple) and all(isinstance(one, bool | np.bool_) for one in mask):
        return mask
    kind = f"an array of {dtype_name(mask)}" if is_array(mask) else typed(mask)
    raise TypeError(f"mask must hold one boolean for each example, got {kind}. To convert numbers, pass mask > 0.")


def shape_of_mask(mask: HasDtype | list[bool] | tuple[bool, ...]) -> tuple[int, ...]:
    """Return the shape of a checked mask."""
    return (len(mask),) if isinstance(mask, list | tuple) else tuple(mask.shape)


def is_single_threshold(max_norm: Thresholds) -> bool:
    """Return whether a threshold is one number or array, not a tree of them."""
    return known(max_norm) or isinstance(max_norm, numbers.Number | str | bytes | None)


def check_real(arrays: Sequence[Any], names: Callable[[], Sequence[str]], why: str = _NO_ORDER) -> None:
    """Raise a TypeError that names the first complex array and ends with `why`, the reason and the advice."""
    if isinstance(arrays, Arrays) and not arrays.any_complex:
        return
    if not any(map(is_complex, {x.dtype: x for x in arrays}.values())):
        return
    for index, x in enumerate(arrays):
        if is_complex(x):
            raise TypeError(f"{names()[index] or 'the gradient'} is complex and {why}")


def warn_of_parameters(leaves: Sequence[Any]) -> None:
    """Warn if the leaves are parameters with gradients: then the weights would be measured, not the gradients."""
    if holding_gradients(leaves):
        warnings.warn(
            "the tree holds parameters that have gradients: the norm is that of the weights. For the gradients, call "
            "gradclip.grad_norm or gradclip.clip_grad_norm_ with the parameters. For the weights, pass "
            "parameter.detach().",
            UserWarning,
            stacklevel=4,
        )


def check_monitor(monitor: object) -> None:
    """Raise a TypeError if `monitor` is neither a monitor nor None."""
    if monitor is not None and (isinstance(monitor, type) or not hasattr(monitor, "record")):
        raise TypeError(
            f"monitor must be a gradclip.Monitor, got {typed(monitor)}. Before the "
            "loop, write monitor = gradclip.Monitor(), and pass it at every step."
        )


def is_array(value: object) -> TypeGuard[HasDtype]:
    """Return whether a value has a dtype and a shape, like the arrays of all frameworks."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _real(value: object, name: str, advice: str, too_large: str) -> Any:
    if isinstance(value, np.ndarray) and value.shape == () and not is_masked(value):
        value = value[()]
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _rounded_down(value, too_large)
    if getattr(value, "shape", None) == () and (hasattr(value, "item") or known(value)) and _holds_reals(value):
        return value
    by_layer = "For one threshold per layer, call gradclip.clip_by_layer_norm, or clip_grad_layer_norm_ for parameters"
    if name == "max_norm" and isinstance(value, dict | list | tuple):
        advice = f"{by_layer}."
    elif getattr(value, "shape", None) == (1,):
        advice = f"Pass the number in it, {name}[0]."
    elif name == "max_norm" and len(getattr(value, "shape", ())) == 1:
        advice = f"{by_layer}, with list(max_norm)."
    elif name == "clipping" and isinstance(value, dict | list | tuple):
        advice = "For several, call it once for each, and choose its parameters by where=."
    advice = getattr(value, "_instead_of_threshold", advice)
    if isfunction(value) or isinstance(value, partial):
        advice = (
            f"Call a schedule at every step: {name}=schedule(step). For a transformation of optax, wrap what makes it, "
            f"such as optax.inject_hyperparams(clip_by_global_norm)({name}=schedule)."
        )
    if isinstance(value, type):
        advice = f"This is a class. Make an object of it, before the loop: {value.__name__}()."
    raise TypeError(f"{name} must be a real number or a scalar array of real dtype, got {typed(value)}. {advice}")


def _item(scalar: Any, name: str) -> Any:
    """Return the number in a scalar array. Raises ValueError if it holds none, as on PyTorch's meta device."""
    empty = without_values(scalar)
    if empty is not None:
        raise ValueError(f"{name} is {empty}, which holds no value. Pass a number.")
    return number_in(scalar)


def _rounded_down(value: numbers.Real, too_large: str) -> float:
    exact = int(value) if isinstance(value, numbers.Integral) else value
    try:
        number = float(exact)
    except OverflowError:
        raise ValueError(too_large.format(digits=_digits(exact))) from None
    return math.nextafter(number, -math.inf) if number > exact else number


def _digits(number: Any) -> int:
    return round(int(number).bit_length() * math.log10(2))


def _holds_reals(array: object) -> bool:
    name = dtype_name(array) if hasattr(array, "dtype") else ""
    return ("float" in name or "int" in name) and not is_masked(array)
