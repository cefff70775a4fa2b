"""Clip gradients in PyTorch, JAX, NumPy, TensorFlow and MLX. The result never exceeds the threshold, even by rounding.

What you want                                            What to call

Clip the gradients of parameters in place, between `backward()` and `step()`
  by their global norm                                   clip_grad_norm_(parameters, max_norm)
  each gradient by its own norm                          clip_grad_layer_norm_(parameters, max_norm)
  each row or filter by its own norm                     clip_grad_unit_norm_(parameters, max_norm)
  each row or filter, relative to its weights (AGC)      adaptive_grad_clip_(parameters)
  each element                                           clip_grad_value_(parameters, clip_value)
  any of these at each step, also in trainers            clip_at_step(optimizer, max_norm)
  what a step changes, beside or instead of gradients    clip_update_at_step(optimizer)

Clip a tree of arrays: returns new arrays and, except by value, the norm before clipping
  by their global norm                                   clip_by_global_norm(tree, max_norm)
  each array, or each group of arrays, by its own norm   clip_by_layer_norm(tree, max_norm)
  each row or filter by its own norm                     clip_by_unit_norm(tree, max_norm)
  each row or filter, relative to its weights (AGC)      adaptive_grad_clip(tree, params)
  each element                                           clip_by_value(tree, clip_value)

Measure
  the global norm of gradients                           global_norm(tree), grad_norm(parameters)
  the norm of each array                                 layer_norms(tree)
  check that a norm is at most a threshold, exactly      norm_at_most(tree, max_norm)
  check an update of a client, with the reason           check_update(tree, max_norm, like=template)
  a gradient too large for memory, file by file          partial_norm(tree)

Train with differential privacy
  the sum of clipped per-example gradients of a loss     clipped_grad(loss, max_norm)
  the same for any function of one example               clipped_fun(fun, max_norm)
  the same from per-example gradients you have           per_example_clip(grads, max_norm)
  the sensitivity, to scale the noise by                 .sensitivity(), clipped_sum_sensitivity(max_norm)
  test that code keeps its promised sensitivity          check_sensitivity(fun, examples, sensitivity=s)
  bound the epsilon of a run from below, by canaries     audited_epsilon, from the scores of its canaries
  batches sampled as accountants assume                  PoissonBatches(n, rate, steps=steps)
  noise for the sum, drawn exactly                       add_noise, with rng="system"
  noise for an epsilon, and what a run has spent         PrivateRun, made before the loop

Choose a threshold
  let it follow the norms of past steps                  AdaptiveThreshold(), SteadyRule() for Adam
  the same, with differential privacy                    PrivateQuantile()
  see how often clipping happens, and get advice         Monitor()
  try thresholds with a short training                   find_max_norm(train)
  find the examples behind a loss spike                  explain_spike(loss, params, batch=batch)

Find mistakes
  see what an optimizer really gets at its steps         guard(optimizer, max_norm)

Keep the function names of another library               gradclip.integrations: torch, optax, tensorflow, keras, ...
See which compiled kernels are in use                    native_status()

For the details of a function, call `help`: `help(gradclip.clip_grad_norm_)`. The public API is the names in `gradclip`,
`gradclip.typing` and the modules of `gradclip.integrations`. All else is internal.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradclip._src.distributed.partial_norm import PartialNorm, partial_norm
from gradclip._src.functional.clip import (
    adaptive_grad_clip,
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_unit_norm,
    clip_by_value,
    global_norm,
    layer_norms,
)
from gradclip._src.functional.norm_at_most import norm_at_most
from gradclip._src.inplace.layers import clip_grad_layer_norm_
from gradclip._src.inplace.norm import clip_grad_norm_, clip_grad_value_, grad_norm
from gradclip._src.inplace.units import adaptive_grad_clip_, clip_grad_unit_norm_
from gradclip._src.native import NativeStatus, native_status
from gradclip._src.private.batching.calls import ExampleOutputs
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.functions.transforms import clipped_fun, clipped_grad
from gradclip._src.private.sums.clip import PerExampleInfo, per_example_clip
from gradclip._src.private.sums.layout import SumLayout
from gradclip._src.private.sums.sensitivity import Sensitivity, clipped_sum_sensitivity
from gradclip._src.thresholds.below_usual import SpreadRule, SteadyRule
from gradclip._src.thresholds.history import NormHistory, SteadyHistory
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.thresholds.private import PrivateQuantile, PrivateQuantileState
from gradclip._src.thresholds.quantile import QuantileRule
from gradclip._src.words import advise_on_imports, no_attribute

if TYPE_CHECKING:
    from gradclip import integrations as integrations
    from gradclip import typing as typing
    from gradclip._src.explained import SpikeExplanation, explain_spike
    from gradclip._src.guard.guard import guard
    from gradclip._src.monitor.monitor import Monitor
    from gradclip._src.monitor.records import Spike
    from gradclip._src.private.audit.canaries import audited_epsilon
    from gradclip._src.private.audit.self_test import SensitivityReport, check_sensitivity
    from gradclip._src.private.noise.add import add_noise
    from gradclip._src.private.run.batches import PoissonBatches
    from gradclip._src.private.run.run import PrivateRun
    from gradclip._src.step.attach import clip_at_step, clip_update_at_step
    from gradclip._src.step.warned import ClippingError, ClippingWarning
    from gradclip._src.thresholds.search.find import MaxNormSearch, find_max_norm
    from gradclip._src.updates.update import check_update
    from gradclip._src.updates.verdict import UpdateCheck

__version__ = "0.1.0"

__all__ = [
    "AdaptiveThreshold",
    "ClippedFunction",
    "ClippingError",
    "ClippingWarning",
    "ExampleOutputs",
    "MaxNormSearch",
    "Monitor",
    "NativeStatus",
    "NormHistory",
    "PartialNorm",
    "PerExampleInfo",
    "PoissonBatches",
    "PrivateQuantile",
    "PrivateQuantileState",
    "PrivateRun",
    "QuantileRule",
    "Sensitivity",
    "SensitivityReport",
    "Spike",
    "SpikeExplanation",
    "SpreadRule",
    "SteadyHistory",
    "SteadyRule",
    "SumLayout",
    "UpdateCheck",
    "adaptive_grad_clip",
    "adaptive_grad_clip_",
    "add_noise",
    "audited_epsilon",
    "check_sensitivity",
    "check_update",
    "clip_at_step",
    "clip_by_global_norm",
    "clip_by_layer_norm",
    "clip_by_unit_norm",
    "clip_by_value",
    "clip_grad_layer_norm_",
    "clip_grad_norm_",
    "clip_grad_unit_norm_",
    "clip_grad_value_",
    "clip_update_at_step",
    "clipped_fun",
    "clipped_grad",
    "clipped_sum_sensitivity",
    "explain_spike",
    "find_max_norm",
    "global_norm",
    "grad_norm",
    "guard",
    "layer_norms",
    "native_status",
    "norm_at_most",
    "partial_norm",
    "per_example_clip",
]

_WHEN_USED = {
    "ClippingError": "gradclip._src.step.warned",
    "ClippingWarning": "gradclip._src.step.warned",
    "MaxNormSearch": "gradclip._src.thresholds.search.find",
    "Monitor": "gradclip._src.monitor.monitor",
    "PoissonBatches": "gradclip._src.private.run.batches",
    "PrivateRun": "gradclip._src.private.run.run",
    "SensitivityReport": "gradclip._src.private.audit.self_test",
    "Spike": "gradclip._src.monitor.records",
    "SpikeExplanation": "gradclip._src.explained",
    "UpdateCheck": "gradclip._src.updates.verdict",
    "add_noise": "gradclip._src.private.noise.add",
    "audited_epsilon": "gradclip._src.private.audit.canaries",
    "check_sensitivity": "gradclip._src.private.audit.self_test",
    "check_update": "gradclip._src.updates.update",
    "clip_at_step": "gradclip._src.step.attach",
    "clip_update_at_step": "gradclip._src.step.attach",
    "explain_spike": "gradclip._src.explained",
    "find_max_norm": "gradclip._src.thresholds.search.find",
    "guard": "gradclip._src.guard.guard",
}

_MODULES = ("integrations", "typing")

advise_on_imports()


if not TYPE_CHECKING:  # or a misspelt name would be right to type checkers

    def __getattr__(name: str) -> Any:
        """Import rarely used names on first access, and the modules that users see."""
        if name in _MODULES:
            return import_module(f"gradclip.{name}")
        if name not in _WHEN_USED:
            raise no_attribute(name, sys.modules[__name__])
        found = globals()[name] = getattr(import_module(_WHEN_USED[name]), name)
        return found


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
