"""Parameters whose operations report themselves.

A known operation, such as `linear`, runs for the whole batch with the parameter as it is, and its input is kept. Any
other operation gets a copy of the parameter for each example, and autograd finds the gradients of the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import resolve_name

from gradclip._src.private.ghost.torch.layout import layout_of
from gradclip._src.private.ghost.torch.run import ForwardPass, Leaf, Tap
from gradclip._src.private.ghost.torch.vmap import is_of_example

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
