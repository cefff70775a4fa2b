"""Views and casts of parameters, which are followed, and operations that need no more than their shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from gradclip._src.private.ghost.torch.layout import ViewLayout
from gradclip._src.private.ghost.torch.parameter import (
    UNKNOWN,
    Arguments,
    Keywords,
    Operation,
    TappedParameter,
    constant,
    handles,
    parameter,
    replaced,
    sentinel_of,
    tapped,
)
from gradclip._src.private.ghost.torch.rows import rows_at
from gradclip._src.private.ghost.torch.run import Tap

Change = Callable[[torch.Tensor], Any]


def _both(*names: str) -> list[Any]:
    """Return the functions and methods of these names."""
    return [getattr(room, name) for name in names for room in (torch, torch.Tensor) if hasattr(room, name)]


_VIEWS = _both(
    *("t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "squeeze", "unsqueeze"),
    *("view", "reshape", "flatten", "unflatten", "ravel", "narrow", "select", "chunk", "split", "split_with_sizes"),
    *("tensor_split", "unsafe_chunk", "unbind", "hsplit", "vsplit", "dsplit", "positive"),
)
_ATTRIBUTES = [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
_CASTS = _both("to", "float", "double", "half", "bfloat16", "type", "contiguous", "clone", "cuda", "cpu", "type_as")
_AS_OTHER = _both(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones"),
    *("new_empty", "new_full", "new_tensor", "reshape_as", "view_as", "expand_as", "detach", "result_type"),
)
_FACTS = _both(
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "is_complex"),
    *("is_floating_point", "data_ptr", "element_size", "get_device", "untyped_storage", "is_same_size", "item"),
    *("tolist", "__len__", "__repr__", "__format__", "__bool__", "__float__", "__int__", "__hash__", "is_signed"),
)


@handles(*_VIEWS, *_ATTRIBUTES)
def view(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Follow a view."""
    x, *rest = args
    key = _key((rest, kwargs))
    if not tapped(x) or key is None:
        return UNKNOWN
    return _followed(x, partial(_called, func, rest, kwargs), (func, key), _viewed)


@handles(torch.Tensor.__getitem__)
def item(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Follow a slice, or keep the indices of rows."""
    x, index = args
    key = _key(index)
    if not tapped(x):
        return UNKNOWN
    if key is None:
        return rows_at(x.tap, index)
    return _followed(x, partial(_called, func, [index], {}), (func, key), _viewed)


@handles(torch.Tensor.__iter__)
def iterated(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Follow the rows of a parameter."""
    return iter(torch.unbind(args[0]))


@handles(*_CASTS)
def cast(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Follow a cast or a copy; a cast to the kind of a parameter depends on its dtype alone."""
    x, *rest = args
    if not tapped(x):
        return as_other(func, args, kwargs)
    rest = replaced(rest, _value)
    key = _key((rest, kwargs))
    if key is None:
        return _followed(x, partial(_called, func, rest, kwargs), None, _same)
    return _followed(x, partial(_called, func, rest, kwargs), (func, key), _same)


@handles(*_AS_OTHER)
def as_other(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Compute what depends on a parameter's shape and dtype alone, or on its values as constants."""
    return func(*replaced(tuple(args), _value), **replaced(kwargs, _value))


@handles(*_FACTS)
def fact(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Compute a number or a text."""
    return constant(func, args, kwargs)


def _value(x: TappedParameter) -> torch.Tensor:
    return x.tap.weight.detach()


def _called(func: Callable[..., Any], rest: Arguments, kwargs: Keywords, x: torch.Tensor) -> Any:
    return func(x, *rest, **kwargs)


Layouts = Callable[[Tap, Change, Hashable, int], list[ViewLayout | None]]


def _viewed(tap: Tap, change: Change, key: Hashable, count: int) -> list[ViewLayout | None]:
    return tap.layout.children(change, (), key)


def _same(tap: Tap, change: Change, key: Hashable, count: int) -> list[ViewLayout | None]:
    return [tap.layout] * count


def _followed(x: TappedParameter, change: Change, key: Hashable, layouts: Layouts) -> Any:
    """Return what a parameter becomes by a change: one or several parameters again."""
    tap = x.tap
    if not (tap.leaf.tapped and tap.inside):
        return UNKNOWN
    known = tap.run.views.get((tap, key)) if key is not None else None
    if known is not None:
        return known
    weights = change(tap.weight)
    several = isinstance(weights, tuple | list)
    one = weights[0] if several else weights
    if not one.is_floating_point():
        return UNKNOWN if one.is_complex() else weights
    found = layouts(tap, change, key, len(weights) if several else 1)
    if None in found:
        return UNKNOWN
    sentinels = change(sentinel_of(x))
    made: Any
    if several:
        each = enumerate(zip(found, weights, sentinels, strict=True))
        made = tuple(_child(tap, layout, w, s, partial(_at, change, i)) for i, (layout, w, s) in each)
    else:
        made = _child(tap, found[0], weights, sentinels, change)
    if key is not None:
        tap.run.views[tap, key] = made
    return made


def _child(tap: Tap, layout: ViewLayout | None, weight: torch.Tensor, sentinel: torch.Tensor, how: Change) -> Any:
    assert layout is not None
    return parameter(sentinel, Tap(tap.run, tap.leaf, layout, weight, (tap, how)))


def _at(change: Change, index: int, x: torch.Tensor) -> Any:
    return change(x)[index]


def _key(x: object) -> Hashable:
    """Return what identifies the arguments of a view, None if a tensor or a flag is among them."""
    if isinstance(x, slice):
        parts = tuple(map(_key, (x.start, x.stop, x.step)))
        return None if None in parts else ("slice", *parts)
    if isinstance(x, tuple | list):
        parts = tuple(map(_key, x))
        return None if None in parts else (type(x) is tuple, *parts)
    if isinstance(x, dict):
        return _key([part for pair in sorted(x.items()) for part in pair])
    if x is None or x is Ellipsis or isinstance(x, str | torch.dtype | torch.device | torch.memory_format | bool):
        return ("constant", type(x).__name__, str(x))
    return x if isinstance(x, int) else None
