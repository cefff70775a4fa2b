"""Gradient clipping with one meaning for every framework, and a bound that holds exactly."""

from gradclip.check_sensitivity import SensitivityReport, check_sensitivity
from gradclip.clip import (
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    global_norm,
    layer_norms,
)
from gradclip.clipped import ClippedFunction, ExampleOutputs
from gradclip.inplace import clip_grad_norm_, clip_grad_value_, grad_norm
from gradclip.native import NativeStatus, native_status
from gradclip.norm_at_most import norm_at_most
from gradclip.per_example import PerExampleInfo, per_example_clip
from gradclip.sensitivity import Sensitivity, clipped_sum_sensitivity
from gradclip.streamed import PartialNorm, partial_norm
from gradclip.transforms import clipped_fun, clipped_grad

__version__ = "0.1.0"

__all__ = [
    "ClippedFunction",
    "ExampleOutputs",
    "NativeStatus",
    "PartialNorm",
    "PerExampleInfo",
    "Sensitivity",
    "SensitivityReport",
    "check_sensitivity",
    "clip_by_global_norm",
    "clip_by_layer_norm",
    "clip_by_value",
    "clip_grad_norm_",
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
