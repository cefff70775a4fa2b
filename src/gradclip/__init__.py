"""Gradient clipping with one meaning for every framework, and a bound that holds exactly."""

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
        raise AttributeError(f"module 'gradclip' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_WHEN_USED[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
