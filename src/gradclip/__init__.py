"""Clip gradients in PyTorch, JAX, NumPy and TensorFlow: never above the threshold, not even by rounding.

What you want                                            What to call

Clip the gradients of parameters, in place, between `backward()` and `step()`
  by the norm of all of them                             clip_grad_norm_(parameters, max_norm)
  each gradient by its own norm                          clip_grad_layer_norm_(parameters, max_norm)
  each row or filter by its own norm                     clip_grad_unit_norm_(parameters, max_norm)
  each row or filter beside its weights (AGC)            adaptive_grad_clip_(parameters)
  each element                                           clip_grad_value_(parameters, clip_value)

Clip a tree of arrays: new arrays come back, and the norm before clipping
  by the norm of all of them                             clip_by_global_norm(tree, max_norm)
  each array, or each group of arrays                    clip_by_layer_norm(tree, max_norm)
  each row or filter by its own norm                     clip_by_unit_norm(tree, max_norm)
  each row or filter beside its weights (AGC)            adaptive_grad_clip(tree, params)
  each element                                           clip_by_value(tree, max_value)

Measure
  the norm of all gradients                              global_norm(tree), grad_norm(parameters)
  the norm of each array                                 layer_norms(tree)
  whether a norm is at most a threshold, exactly         norm_at_most(tree, max_norm)
  a gradient too large for memory, file by file          partial_norm(tree)

Train with differential privacy
  from a loss to the clipped sum of gradients            clipped_grad(loss, max_norm)
  from any function to the clipped sum of results        clipped_fun(fun, max_norm)
  from per-example gradients to their clipped sum        per_example_clip(grads, max_norm)
  how much noise the sum needs                           .sensitivity(), clipped_sum_sensitivity(max_norm)
  test that code keeps a sensitivity                     check_sensitivity(fun, examples, promised)

Choose a threshold
  one that follows the norms                             AdaptiveNorm(), QuantileThreshold()
  the same, privately                                    PrivateQuantile()
  see how often clipping fires, get advice               Monitor()

Keep the names of another library                        gradclip.integrations: torch, optax, tensorflow, keras, ...
Say whether the compiled kernels are in use              native_status()

`help(gradclip.clip_grad_norm_)` explains one of them. Modules other than `gradclip.integrations` are internal.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.adaptive.private import PrivateQuantile, PrivateQuantileState
from gradclip.adaptive.quantile import NormHistory, QuantileThreshold
from gradclip.clip import (
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    global_norm,
    layer_norms,
)
from gradclip.clip_units import adaptive_grad_clip, clip_by_unit_norm
from gradclip.distributed.partial_norm import PartialNorm, partial_norm
from gradclip.inplace.clip import clip_grad_norm_, clip_grad_value_, grad_norm
from gradclip.inplace.layers import clip_grad_layer_norm_
from gradclip.inplace.units import adaptive_grad_clip_, clip_grad_unit_norm_
from gradclip.native import NativeStatus, native_status
from gradclip.norm_at_most import norm_at_most
from gradclip.per_example.clip import PerExampleInfo, per_example_clip
from gradclip.per_example.function import ClippedFunction, ExampleOutputs
from gradclip.per_example.promise import Sensitivity
from gradclip.per_example.sensitivity import clipped_sum_sensitivity
from gradclip.per_example.transforms import clipped_fun, clipped_grad

if TYPE_CHECKING:
    from gradclip.monitor.monitor import Monitor
    from gradclip.per_example.self_test import SensitivityReport, check_sensitivity

__version__ = "0.1.0"

__all__ = [
    "AdaptiveNorm",
    "ClippedFunction",
    "ExampleOutputs",
    "Monitor",
    "NativeStatus",
    "NormHistory",
    "PartialNorm",
    "PerExampleInfo",
    "PrivateQuantile",
    "PrivateQuantileState",
    "QuantileThreshold",
    "Sensitivity",
    "SensitivityReport",
    "adaptive_grad_clip",
    "adaptive_grad_clip_",
    "check_sensitivity",
    "clip_by_global_norm",
    "clip_by_layer_norm",
    "clip_by_unit_norm",
    "clip_by_value",
    "clip_grad_layer_norm_",
    "clip_grad_norm_",
    "clip_grad_unit_norm_",
    "clip_grad_value_",
    "clipped_fun",
    "clipped_grad",
    "clipped_sum_sensitivity",
    "global_norm",
    "grad_norm",
    "layer_norms",
    "native_status",
    "norm_at_most",
    "partial_norm",
    "per_example_clip",
]

_SELF_TEST = "gradclip.per_example.self_test"
_WHEN_USED = {
    "Monitor": "gradclip.monitor.monitor",
    "SensitivityReport": _SELF_TEST,
    "check_sensitivity": _SELF_TEST,
}


def __getattr__(name: str) -> Any:
    """Import what most programs do without when it is asked for."""
    if name not in _WHEN_USED:
        from gradclip.guesses import advice_on_name

        message = f"module 'gradclip' has no attribute {name!r}. {advice_on_name(name)}".removesuffix(". ")
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    found = globals()[name] = getattr(import_module(_WHEN_USED[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
