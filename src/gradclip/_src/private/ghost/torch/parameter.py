"""Parameters whose operations report themselves: rows, views and casts, which are followed, and shapes.

A known operation, such as `linear`, runs for the whole batch with the parameter as it is, and its input is kept. Any
other operation gets a copy of the parameter for each example, and autograd finds the gradients of the copies.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import resolve_name

from gradclip._src.private.ghost.records import Embedding
from gradclip._src.private.ghost.torch.layout import ViewLayout, layout_of
from gradclip._src.private.ghost.torch.run import ForwardPass, Leaf, Tap, is_of_example, unviewed

Operation = Callable[..., Any]
Arguments = Sequence[Any]
Keywords = dict[str, Any]
Handler = Callable[[Operation, Arguments, Keywords], Any]

HANDLERS: dict[Operation, Handler] = {}
"""What to do for each known operation, called with the operation and its arguments."""

UNKNOWN = object()
"""What a handler returns for arguments that it does not know."""


class TappedParameter(torch.Tensor):
    """A parameter or a view of one. As a tensor it is the leaf's sentinel."""

    tap: Tap

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not torch.is_grad_enabled():
            return constant(func, args, kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            made = handler(func, args, kwargs)
            if made is not UNKNOWN:
                return made
        elif func.__name__ == "__get__":
            return constant(func, args, kwargs)
        return on_copies(func, args, kwargs)


def handles(*operations: Operation) -> Callable[[Handler], Handler]:
    """Make a function the handler of operations."""

    def decorate(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(operations, handler))
        return handler

    return decorate


signature = lru_cache(inspect.signature)


def all_arguments(func: Operation, args: Arguments, kwargs: Keywords) -> tuple[Any, ...]:
    """Return the arguments of a function that is written in Python, also those that are not given."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def tapped(x: object) -> bool:
    """Say whether a value is a parameter that reports its operations."""
    return type(x) is TappedParameter


def parameter(sentinel: torch.Tensor, tap: Tap) -> TappedParameter:
    """Return a view of a parameter, with its sentinel."""
    made = sentinel.as_subclass(TappedParameter)
    made.tap = tap
    return made


def whole(run: ForwardPass, leaf: Leaf) -> TappedParameter:
    """Return a whole parameter."""
    leaf.sentinel = leaf.weight.detach().requires_grad_()
    return parameter(leaf.sentinel, Tap(run, leaf, layout_of(tuple(leaf.weight.shape)), leaf.weight))


def sentinel_of(x: TappedParameter) -> torch.Tensor:
    """Return the sentinel as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        made: torch.Tensor = x.as_subclass(torch.Tensor)
    return made


def replaced(x: object, change: Callable[[Any], object], kind: type = TappedParameter) -> Any:
    """Return arguments with their parameters replaced, also inside of lists, tuples and dicts."""
    if type(x) is kind:
        return change(x)
    if isinstance(x, tuple) and type(x) is not torch.Size:
        made = [replaced(one, change, kind) for one in x]
        return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
    if isinstance(x, list):
        return [replaced(one, change, kind) for one in x]
    if isinstance(x, dict):
        return {key: replaced(one, change, kind) for key, one in x.items()}
    return x


def constant(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Return the result of an operation through which no gradient flows."""
    given: dict[int, TappedParameter] = {}

    def value(x: TappedParameter) -> torch.Tensor:
        given[id(x.tap.weight)] = x
        return x.tap.weight

    with torch.no_grad():
        made = func(*replaced(tuple(args), value), **replaced(kwargs, value))
    return given.get(id(made), made)


def on_copies(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Return the result of an operation with a copy of each parameter for each example."""
    args, kwargs = with_copies(func, args, kwargs)
    return func(*args, **kwargs)


def with_copies(func: Operation, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Return the arguments of an operation that is not known, with a copy of each parameter for each example."""

    def copies(x: TappedParameter) -> torch.Tensor:
        x.tap.leaf.untap(_named(func, x.tap), added=_only_adds(func, args, x.tap))
        return x.tap.copies()

    return replaced(tuple(args), copies), replaced(kwargs, copies)


_ADDITIONS = {
    getattr(room, name)
    for room in (torch, torch.Tensor)
    for name in ("add", "sub", "add_", "sub_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__")
    if hasattr(room, name)
}


def _only_adds(func: Operation, args: Arguments, tap: Tap) -> bool:
    """Say whether an operation adds most of a parameter to values of the example."""
    if func not in _ADDITIONS or not tap.inside or 2 * tap.weight.numel() < tap.leaf.weight.numel():
        return False
    return any(isinstance(x, torch.Tensor) and not tapped(x) and is_of_example(x, tap.run.level) for x in args)


def _named(func: Operation, tap: Tap) -> str:
    name = resolve_name(func) or getattr(func, "__name__", repr(func))
    return str(name) if tap.inside else f"{name} inside a transform of torch.func"


@handles(F.embedding, torch.embedding)
def embedding(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the indices. The row `padding_idx` gets no gradient."""
    read = _table_arguments(*args, **kwargs) if func is torch.embedding else all_arguments(func, args, kwargs)
    indices, table, padding, max_norm, _, by_frequency, _ = read
    if tapped(indices):
        return UNKNOWN
    if padding is not None and padding < 0:
        padding += len(table)
    made = UNKNOWN
    if tapped(table):
        refused = "max_norm" if max_norm is not None else "scale_grad_by_freq" if by_frequency else ""
        if refused:
            table.tap.leaf.untap(f"embedding with {refused}")
        else:
            made = _picked(table.tap, indices, "embedding", padding)
    if made is UNKNOWN:
        made = on_copies(func, args, kwargs)
        if padding is not None:
            # Where each example has a table of its own, `vmap` gives this row a gradient.
            made = torch.where((indices == padding)[..., None], made.detach(), made)
    return made


def _table_arguments(
    weight: object, indices: object, padding_idx: int = -1, scale_grad_by_freq: object = False, sparse: object = False
) -> tuple[Any, ...]:
    return indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse


def rows_at(tap: Tap, index: object) -> Any:
    """Keep `table[index]` for a tensor of integers."""
    integers = (torch.int64, torch.int32, torch.int16, torch.int8)
    if not isinstance(index, torch.Tensor) or tapped(index) or index.dtype not in integers:
        return UNKNOWN
    return _picked(tap, index, "indexing", None)


@handles(torch.index_select, torch.Tensor.index_select)
def index_select(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the indices of rows."""
    if len(args) != 3 or kwargs or not tapped(args[0]) or args[1] != 0 or tapped(args[2]):
        return UNKNOWN
    return rows_at(args[0].tap, args[2])


def _picked(tap: Tap, indices: torch.Tensor, name: str, padding: int | None) -> Any:
    if not (tap.leaf.tapped and tap.inside) or tap.weight.dim() == 0:
        return UNKNOWN
    found = tap.layout.place((), (0,), tuple(range(1, tap.weight.dim())))
    if found is None or not found[1]:
        tap.leaf.untap(f"{name} of columns or of a view that is not a box of the parameter")
        return UNKNOWN
    run, place = tap.run, found[0]
    batch = run.batch(indices)
    made = unviewed(tap.weight[batch])
    positions, columns = math.prod(batch.shape[1:]), place.shape[2]

    def finish(e: torch.Tensor) -> Embedding:
        rows = batch.reshape(run.count, positions).long()
        right = e.reshape(run.count, positions, columns)
        if padding is not None:
            right = right.where((rows != padding)[..., None], 0)
        return Embedding(rows.where(rows >= 0, rows + place.shape[1]), right)

    tap.keep_term(place, positions, name, made, batch, finish, embedding=True)
    return run.one(made)


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
    return _followed(x, lambda one: func(one, *rest, **kwargs), (func, key), _viewed)


@handles(torch.Tensor.__getitem__)
def item(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Follow a slice, or keep the indices of rows."""
    x, index = args
    key = _key(index)
    if not tapped(x):
        return UNKNOWN
    if key is None:
        return rows_at(x.tap, index)
    return _followed(x, lambda one: func(one, index), (func, key), _viewed)


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
    return _followed(x, lambda one: func(one, *rest, **kwargs), None if key is None else (func, key), _same)


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
        hows: list[Change] = [lambda one, i=i: change(one)[i] for i in range(len(weights))]  # type: ignore[misc]
        made = tuple(_child(tap, *each) for each in zip(found, weights, sentinels, hows, strict=True))
    else:
        made = _child(tap, found[0], weights, sentinels, change)
    if key is not None:
        tap.run.views[tap, key] = made
    return made


def _child(tap: Tap, layout: ViewLayout | None, weight: torch.Tensor, sentinel: torch.Tensor, how: Change) -> Any:
    assert layout is not None
    return parameter(sentinel, Tap(tap.run, tap.leaf, layout, weight, (tap, how)))


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
