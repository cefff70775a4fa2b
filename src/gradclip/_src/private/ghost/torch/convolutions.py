"""Convolutions with parameters: products of patches of the input, or of the result of a transposed convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from gradclip._src.private.ghost.records import Dense
from gradclip._src.private.ghost.torch.layout import ViewLayout
from gradclip._src.private.ghost.torch.parameter import UNKNOWN, Arguments, Keywords, Operation, handles, tapped
from gradclip._src.private.ghost.torch.products import whole_bias
from gradclip._src.private.ghost.torch.run import NO_BOX, Product, Roles, Tap, as_multiplied, dense, roles_of, unviewed

_ALL = slice(None)
_PLAIN = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


@handles(*_PLAIN)
def convolution(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep a convolution. Each position of the result is a term, with a patch of the input."""
    x, weight, bias, stride, padding, dilation, groups = _arguments(*args, **kwargs)
    axes = 1 + _PLAIN.index(func)
    if tapped(x) or not tapped(weight) or x.dim() not in (axes + 1, axes + 2):
        return UNKNOWN
    tap = weight.tap
    roles = _roles(tap, axes, groups, transposed=False)
    if roles is None:
        return UNKNOWN
    windows = _Windows(tuple(tap.weight.shape[2:]), _each(stride, axes), _each(dilation, axes))
    pads = windows.pads(padding)
    given, made = _computed(tap, func, x, axes, bias, stride, padding, dilation, groups)
    factor = as_multiplied(given, made)

    def factors(e: torch.Tensor, some: slice = _ALL) -> Dense:
        padded, counts = _padded(factor[some], pads), tuple(e.shape[3:])
        # One row of a window is one piece of memory, or, where the product is made, one row of the result.
        if some is not _ALL and groups == 1 and padded.shape[2] * windows.sizes[-1] < counts[-1]:
            patches = _positions_last(windows.of(padded, counts), axes)
        else:
            patches = windows.of(padded.movedim(2, -1).contiguous().movedim(-1, 2), counts)
        return dense(roles, patches.unflatten(2, (groups, -1)), e.unflatten(2, (groups, -1)), _positions(e))

    return _kept(tap, roles, func.__name__, given, made, factors, _positions(made), x, bias)


@handles(*_TRANSPOSED)
def transposed_convolution(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep a transposed convolution. Each position of the input is a term, with a patch of the result."""
    x, weight, bias, stride, padding, output_padding, groups, dilation = _transposed_arguments(*args, **kwargs)
    axes = 1 + _TRANSPOSED.index(func)
    if tapped(x) or not tapped(weight) or x.dim() not in (axes + 1, axes + 2):
        return UNKNOWN
    tap = weight.tap
    roles = _roles(tap, axes, groups, transposed=True)
    if roles is None:
        return UNKNOWN
    windows = _Windows(tuple(tap.weight.shape[2:]), _each(stride, axes), _each(dilation, axes))
    pads = windows.pads(padding)
    given, made = _computed(tap, func, x, axes, bias, stride, padding, output_padding, groups, dilation)
    factor = as_multiplied(given, made)

    def factors(e: torch.Tensor, some: slice = _ALL) -> Dense:
        patches = windows.of(_padded(e, pads), tuple(factor.shape[3:])).unflatten(2, (groups, -1))
        return dense(roles, factor[some].unflatten(2, (groups, -1)), patches, _positions(factor))

    return _kept(tap, roles, func.__name__, given, made, factors, _positions(given), x, bias)


def _arguments(
    input: object,
    weight: object,
    bias: object = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: object = 1,
) -> tuple[Any, ...]:
    return input, weight, bias, stride, padding, dilation, groups


def _transposed_arguments(
    input: object,
    weight: object,
    bias: object = None,
    stride: object = 1,
    padding: object = 0,
    output_padding: object = 0,
    groups: object = 1,
    dilation: object = 1,
) -> tuple[Any, ...]:
    return input, weight, bias, stride, padding, output_padding, groups, dilation


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Return one number for each axis."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


def _roles(tap: Tap, axes: int, groups: int, *, transposed: bool) -> Roles | None:
    """Return what the axes of the patches and of the parameter mean, with groups as blocks."""
    if not (tap.leaf.tapped and tap.inside):
        return None
    first, *rest = tap.weight.shape
    layout: ViewLayout | None = tap.layout.split((groups, first // groups, *rest))
    roles = None if layout is None else roles_of(_product(axes, transposed), layout)
    if roles is None:
        tap.leaf.untap(NO_BOX)
    return roles


@lru_cache
def _product(axes: int, transposed: bool) -> Product:
    places = tuple(("place", i) for i in range(axes))
    kernel = tuple(("kernel", i) for i in range(axes))
    if transposed:
        view = ("group", "in", "out", *kernel)
        return Product(("n", "group", "in", *places), view, ("n", "group", "out", *places, *kernel))
    view = ("group", "out", "in", *kernel)
    given = ("n", "group", "in", *places, *kernel)
    return Product(given, view, ("n", "group", "out", *places), inner=(*kernel, "in"))


class _Windows:
    """The windows of a convolution: their sizes, the steps between them, and the steps inside of them."""

    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.sizes, self.strides, self.steps = sizes, strides, steps
        self.widths = tuple(step * (size - 1) + 1 for size, step in zip(sizes, steps, strict=True))

    def pads(self, padding: str | int | Sequence[int]) -> list[tuple[int, int]]:
        """Return the padding before and after each axis."""
        if isinstance(padding, str):
            totals = [width - 1 if padding == "same" else 0 for width in self.widths]
            return [(total // 2, total - total // 2) for total in totals]
        return [(pad, pad) for pad in _each(padding, len(self.sizes))]

    def of(self, x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """Return the first `counts` windows along the last axes: shape (..., *counts, *sizes)."""
        first = x.dim() - len(counts)
        for i, count in enumerate(counts):
            x = x.unfold(first + i, self.widths[i], self.strides[i]).narrow(first + i, 0, count)
            x = x[..., :: self.steps[i]]
        return x


def _positions_last(patches: torch.Tensor, axes: int) -> torch.Tensor:
    """Return patches of shape (batch, n, channels, *counts, *sizes) whose positions are neighbors in memory."""
    order = (0, *range(3 + axes, 3 + 2 * axes), 2, 1, *range(3, 3 + axes))
    back = [order.index(axis) for axis in range(patches.dim())]
    return patches.permute(order).contiguous().permute(back)


def _padded(x: torch.Tensor, pads: Sequence[tuple[int, int]]) -> torch.Tensor:
    return F.pad(x, [pad for pair in reversed(pads) for pad in pair]) if any(map(any, pads)) else x


def _computed(
    tap: Tap, func: Operation, x: torch.Tensor, axes: int, bias: Any, *settings: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the results of all examples: shape (batch, n, channels, ...)."""
    given = tap.run.batch(x if x.dim() == axes + 2 else x.unsqueeze(0))
    own = bias.tap.weight if whole_bias(bias) else None
    made = func(given.flatten(0, 1), tap.weight, own, *settings)
    return given, unviewed(made.unflatten(0, given.shape[:2]))


def _positions(x: torch.Tensor) -> int:
    return math.prod(x.shape[3:]) * x.shape[1]


def _kept(
    tap: Tap,
    roles: Roles,
    name: str,
    given: torch.Tensor,
    made: torch.Tensor,
    factors: Any,
    positions: int,
    x: torch.Tensor,
    bias: Any,
) -> torch.Tensor:
    """Keep the terms, and return the result of one example, with its bias."""
    tap.keep_term(roles.place, positions, name, made, given, factors, of_some=factors)
    axes = made.dim() - 3
    if whole_bias(bias):
        bias.tap.keep_bias((1, *range(3, made.dim())), tuple(made.shape), name)
        bias = None
    one = tap.run.one(made)
    if bias is not None:
        one = one + bias.reshape(-1, *(1,) * axes)
    return one if x.dim() == axes + 2 else one.squeeze(0)
