"""Calls that clip in place say so to those who listen, such as the guard of an optimizer. Usually nobody does."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Call(NamedTuple):
    """A call that has clipped: the function's name, its arguments by name, and what it returned.

    Among the arguments, an iterator of parameters is a list.
    """

    function: str
    arguments: Mapping[str, Any]
    result: Any


listeners: list[Callable[[Call], None]] = []


def announced(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function tell the listeners of each call that succeeds."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not listeners:
            return function(*args, **kwargs)
        return _told(function, args, kwargs)

    return call


def _told(function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    try:
        bound = _signature(function).bind(*args, **kwargs)
    except TypeError:
        return function(*args, **kwargs)  # which says what is wrong
    bound.apply_defaults()
    given = bound.arguments
    # With other processes, an error of the iterator must reach them: only the function can tell them.
    if isinstance(given["parameters"], Iterator) and given.get("process_group") is None and given.get("mesh") is None:
        given["parameters"] = list(given["parameters"]) or given["parameters"]
    result = function(*bound.args, **bound.kwargs)
    for listener in listeners:
        listener(Call(function.__name__, given, result))
    return result


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
