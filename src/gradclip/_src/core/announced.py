"""Calls that clip in place say so to those who listen, such as the guard of an optimizer. Usually nobody does."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class AnnouncedCall(NamedTuple):
    """A call that has clipped: the function's name, the arguments that were passed, by name, and what it returned.

    Among the arguments, an iterator of parameters is a list.
    """

    function: str
    arguments: Mapping[str, Any]
    result: Any


listeners: list[Callable[[AnnouncedCall], None]] = []


def announced(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function tell the listeners of each call that succeeds."""
    names = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not listeners:
            return function(*args, **kwargs)
        return _told(function, names, args, kwargs)

    return call


def _told(function: Callable[..., R], names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    parameters = given.get("parameters")
    # With other processes, an error of the iterator must reach them: only the function can tell them.
    if isinstance(parameters, Iterator) and given.get("process_group") is None and given.get("mesh") is None:
        given["parameters"] = parameters = list(parameters) or parameters
        args, kwargs = ((parameters, *args[1:]), kwargs) if args else ((), {**kwargs, "parameters": parameters})
    result = function(*args, **kwargs)
    for listener in tuple(listeners):  # one may stop listening when it is called
        listener(AnnouncedCall(function.__name__, given, result))
    return result
