"""Calls in place that choose parameters by name, and parameters for them."""

import math
from types import SimpleNamespace

import gradclip
from gradclip._src.inplace.norm import clip_grads_with_norm_

WHERE = "body.*"
CALLS = {
    "clip_grad_norm_": lambda p, **k: gradclip.clip_grad_norm_(p, 1.5, **k),
    "clip_grad_norm_, not clipped": lambda p, **k: gradclip.clip_grad_norm_(p, 1e4, **k),
    "clip_grad_norm_, ord": lambda p, **k: gradclip.clip_grad_norm_(p, 1.5, 3, **k),
    "clip_grad_norm_, drop": lambda p, **k: gradclip.clip_grad_norm_(p, 1.5, nonfinite="drop", **k),
    "clip_grad_norm_, adaptive": lambda p, **k: gradclip.clip_grad_norm_(p, gradclip.AdaptiveThreshold(), **k),
    "clip_grad_norm_, watched": lambda p, **k: gradclip.clip_grad_norm_(p, 1.5, monitor=gradclip.Monitor(), **k),
    "clip_grad_norm_, by name": lambda p, **k: gradclip.clip_grad_norm_(p, {"*": 0.5}, **k),
    "clip_grads_with_norm_": lambda p, **k: clip_grads_with_norm_(p, 1.0, 20.0, **k),
    "clip_grad_value_": lambda p, **k: gradclip.clip_grad_value_(p, 0.75, **k),
    "grad_norm": gradclip.grad_norm,
}
EACH = {
    "clip_grad_layer_norm_": lambda p, **k: gradclip.clip_grad_layer_norm_(p, 0.7, **k),
    "clip_grad_unit_norm_": lambda p, **k: gradclip.clip_grad_unit_norm_(p, 0.7, **k),
    "adaptive_grad_clip_": lambda p, **k: gradclip.adaptive_grad_clip_(p, 0.1, params=weights(p), **k),
}
GRADS = {
    "body.w": [[3.0, -0.5], [-4.0, 1.5]],
    "head": [math.nan, math.inf],
    "body.b": [0.25, 12.0],
    "body.none": None,
    "other": None,
    "n": [[1e38, 1e38]],
}


def weights(parameters):
    grads = [one.grad for one in parameters.values()]
    return [0.0 if grad is None or "int" in str(grad.dtype) else grad + 1.0 for grad in grads]


def holders(framework, names=GRADS):
    return {n: SimpleNamespace(grad=GRADS[n] and framework.array(GRADS[n])) for n in names}


def chosen_only(parameters):
    return {name: one for name, one in parameters.items() if name.startswith("body.")}


def values(framework, parameters):
    return {n: None if one.grad is None else framework.to_numpy(one.grad) for n, one in parameters.items()}


def called(framework, call, parameters, **arguments):
    with framework.mode():
        return call(parameters, **arguments)


TREES = {
    "clip_grad_norm_": (lambda t, **k: gradclip.clip_grad_norm_(t, 1.5, **k)),
    "clip_grad_norm_, by name": lambda t, **k: gradclip.clip_grad_norm_(t, {"*.w": 0.5, "*": None}, **k),
    "clip_grad_value_": lambda t, **k: gradclip.clip_grad_value_(t, 0.75, **k),
    "clip_grad_layer_norm_": lambda t, **k: gradclip.clip_grad_layer_norm_(t, 0.7, **k),
    "clip_grad_unit_norm_": lambda t, **k: gradclip.clip_grad_unit_norm_(t, 0.7, **k),
    "adaptive_grad_clip_": lambda t, **k: gradclip.adaptive_grad_clip_(t, 0.1, params=t, **k),
    "grad_norm": gradclip.grad_norm,
}
