"""The closure among the arguments of an optimizer's step, wherever the step takes it."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

Closure = Callable[..., Any]


def with_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], wrap: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a step, its closure wrapped and all others as they are; None if it has no closure.

    The first of `args` is the optimizer, as hooks before a step get them.
    """
    if callable(named := kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(named)}
    place = _place(type(args[0]).step)
    if len(args) > place and callable(args[place]) and not isinstance(args[place], torch.nn.Module):
        return (*args[:place], wrap(args[place]), *args[place + 1 :]), dict(kwargs)
    return None


@lru_cache(maxsize=64)
def _place(step: Callable[..., Any]) -> int:
    """Return at which place a step takes its closure: the first behind the optimizer, if none has that name."""
    names = list(inspect.signature(step).parameters)
    return names.index("closure") if "closure" in names else 1
