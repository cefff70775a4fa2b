"""Calls of gradclip's functions on parameters that an engine holds, and what they say."""

import warnings

import torch

import gradclip

CALLS = {
    "grad_norm": gradclip.grad_norm,
    "clip_grad_norm_": lambda p: gradclip.clip_grad_norm_(p, 1e-3),
    "adaptive": lambda p: gradclip.clip_grad_norm_(p, gradclip.AdaptiveThreshold(), monitor=gradclip.Monitor()),
    "clip_grad_value_": lambda p: gradclip.clip_grad_value_(p, 1e-3),
    "clip_grad_layer_norm_": lambda p: gradclip.clip_grad_layer_norm_(p, 1e-3),
    "clip_grad_unit_norm_": lambda p: gradclip.clip_grad_unit_norm_(p, 1e-3),
    "adaptive_grad_clip_": lambda p: gradclip.adaptive_grad_clip_(p, 1e-3),
}


def said(call):
    """Return the error of a call as text, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcome(call, listed):
    """Return the error or the warnings of a call as text."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            call(listed)
        except ValueError as error:
            return f"error: {error}"
    return "; ".join(f"warning: {one.message}" for one in seen)


def outcomes(model, optimizer):
    """Return what each call says on parameters of a model, on these behind another, and on those of an optimizer."""
    lists = {"model": model, "one of two": [with_gradient(), *model], "optimizer": optimizer}
    return {
        f"{name}, {whose}": outcome(call, listed) for name, call in CALLS.items() for whose, listed in lists.items()
    }


def with_gradient():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    return parameter
