"""Normalizations, run for the whole batch: the gradients of scale and bias follow from the cotangents of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch.parameter import UNKNOWN, Arguments, Keywords, Operation, handles, tapped
from gradclip._src.private.ghost.torch.products import whole_bias
from gradclip._src.private.ghost.torch.run import Tap, as_multiplied, unviewed
from gradclip._src.private.ghost.torch.terms import Term

Normalize = Callable[[torch.Tensor, Any, Any], torch.Tensor]


@handles(F.layer_norm)
def layer_norm(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the input, and normalize over the last axis."""
    x, shape, weight, bias, eps = _layer_arguments(*args, **kwargs)
    return _normalized("layer_norm", x, weight, bias, lambda x, w, b: F.layer_norm(x, shape, w, b, eps))


@handles(F.rms_norm)
def rms_norm(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the input, and normalize over the last axis."""
    x, shape, weight, eps = _root_arguments(*args, **kwargs)
    return _normalized("rms_norm", x, weight, None, lambda x, w, b: F.rms_norm(x, shape, w, eps))


@handles(F.group_norm)
def group_norm(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the input, and normalize groups of channels."""
    x, groups, weight, bias, eps = _group_arguments(*args, **kwargs)

    def normalize(batch: torch.Tensor, w: Any, b: Any) -> torch.Tensor:
        return F.group_norm(batch.flatten(0, 1), groups, w, b, eps).unflatten(0, batch.shape[:2])

    return _normalized("group_norm", x, weight, bias, normalize, channels=2)


def _layer_arguments(
    input: object, normalized_shape: object, weight: object = None, bias: object = None, eps: float = 1e-5
) -> tuple[Any, ...]:
    return input, normalized_shape, weight, bias, eps


def _root_arguments(
    input: object, normalized_shape: object, weight: object = None, eps: float | None = None
) -> tuple[Any, ...]:
    return input, normalized_shape, weight, eps


def _group_arguments(
    input: object, num_groups: object, weight: object = None, bias: object = None, eps: float = 1e-5
) -> tuple[Any, ...]:
    return input, num_groups, weight, bias, eps


def _normalized(
    name: str, x: torch.Tensor, weight: Any, bias: Any, normalize: Normalize, channels: int | None = None
) -> Any:
    """Normalize the inputs of all examples. `channels` is the axis of scale and bias, None for the last."""
    own = [p for p in (weight, bias) if p is not None]
    if tapped(x) or not all(map(whole_bias, own)) or not own[0].tap.inside:
        return UNKNOWN
    run = own[0].tap.run
    given = run.batch(x)
    made = unviewed(normalize(given, *(None if p is None else p.tap.weight for p in (weight, bias))))
    axis = made.dim() - 1 if channels is None else channels
    axes = tuple(i for i in range(1, made.dim()) if i != axis)
    if run.recording:
        run.edge(made)
    if weight is not None:
        _keep_scale(weight.tap, given, made, axes, name, normalize)
    if bias is not None:
        bias.tap.keep_bias(axes, tuple(made.shape), name)
    return run.one(made)


def _keep_scale(
    tap: Tap, given: torch.Tensor, made: torch.Tensor, axes: tuple[int, ...], name: str, normalize: Normalize
) -> None:
    """Keep that a parameter scales the normalized inputs, all along these axes."""
    if not tap.run.recording:
        return
    tap.leaf.untap(f"scale of {name}")
    factor = as_multiplied(given, made)

    def finish(e: torch.Tensor) -> Made:
        rows = e * normalize(factor, None, None)
        return Made(rows.sum(axes) if axes else rows)

    tap.leaf.terms.append(Term(None, 0, name, len(tap.run.edges) - 1, finish, given, given._version))
