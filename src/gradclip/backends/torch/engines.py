"""Training engines that hold the gradients of PyTorch's parameters in buffers of their own, and leave `.grad` None."""

import torch

_DEEPSPEED = (
    'DeepSpeed holds this gradient. Set "gradient_clipping" in its configuration. Its engine then clips at step(), '
    "and engine.get_global_grad_norm() returns the norm"
)
_MEGATRON = (
    "it lies in .main_grad, as in Megatron. Set clip_grad of its optimizer, which clips at each step() and returns the "
    "norm. If you step yourself, pass [types.SimpleNamespace(grad=p.main_grad) for p in parameters]"
)
_MARKS = {"ds_id": _DEEPSPEED, "_hp_mapping": _DEEPSPEED, "main_grad": _MEGATRON}
"""Attributes that engines give to parameters: DeepSpeed in ZeRO stage 3, and in stages 1 and 2."""


def engine_of(parameter: torch.Tensor) -> str:
    """Return what to do if an engine holds the gradient of a parameter; empty if none does."""
    if parameter.grad is not None or not parameter.requires_grad:
        return ""
    marks = vars(parameter)
    for mark in _MARKS.keys() & marks.keys():
        if marks[mark] is not None or mark == "_hp_mapping":  # None in processes that hold no part of the parameter
            return _MARKS[mark]
    return ""
