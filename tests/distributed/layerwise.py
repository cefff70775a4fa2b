"""Calls that clip layers and units, on distributed gradients and on the same gradients in one process."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import gradclip
from gradients import ERRORS, whole


def by_layer(params, max_norm, ord=2, **options):
    return gradclip.clip_grad_layer_norm_(params, max_norm, ord=ord, **options)


def by_unit(params, max_norm, ord=2, **options):
    return gradclip.clip_grad_unit_norm_(params, max_norm, ord=ord, **options)


def adaptively(params, max_norm, ord=2, **options):
    return gradclip.adaptive_grad_clip_(params, max_norm / 4, 0.5, ord, **options)


CALLS = (by_layer, by_unit, adaptively)


def close(found, expected, ord=2, dtype=None):
    """Compare; thresholds that are norms, too, err like two norms."""
    error = 2 * max(ERRORS[dtype or found.dtype], 0.0 if ord in (1, 2) or abs(ord) == float("inf") else 2.0**-39)
    torch.testing.assert_close(found, expected, rtol=error, atol=0, equal_nan=True)


def own_part(x, like):
    """Return what this process has of a tensor that is laid out so, without asking the others."""
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None).to_local()


def with_weights(params, weights, part):
    """Set the parameters, or the part of them that a process has, to these weights."""
    for p, x in zip(params, weights, strict=True):
        with torch.no_grad():
            if isinstance(p, DTensor):
                p.to_local().copy_(own_part(x, p))
            else:
                p.copy_(x if part is None else x[..., part])


def compare(call, params, full, max_norm=2.0, ord=2, *, part=None, lacking=(), weights_of=None, **options):
    """Compare a call on distributed gradients with that on whole gradients in one process.

    `part`: what this process has along the last axis of plain tensors. `lacking`: the gradients it has not.
    """
    weights = [x.abs().sqrt() - 0.25 for x in weights_of or full]
    alone = [torch.nn.Parameter(torch.zeros_like(x)) for x in full]
    for p, x in zip(alone, full, strict=True):
        p.grad = x.clone()
    with_weights(alone, weights, None)
    with_weights(params, weights, part)
    known = {key: x for key, x in options.items() if key in ("nonfinite", "unit_axis")}
    wanted, found = call(alone, max_norm, ord, **known), call(params, max_norm, ord, **options)
    for number, (norm, expected, p, q) in enumerate(zip(found, wanted, params, alone, strict=True)):
        if number in lacking:
            assert norm is None
            assert p.grad is None
            continue
        assert norm.dtype == expected.dtype
        close(whole(norm), expected, ord, p.grad.dtype)
        if isinstance(p.grad, DTensor):
            close(p.grad.to_local(), own_part(q.grad, p.grad), ord)
        else:
            close(p.grad, q.grad if part is None else q.grad[..., part], ord)
