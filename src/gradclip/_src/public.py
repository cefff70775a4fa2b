"""Public objects say where users find them, and not in which file they are defined: in errors, pickles and help."""

import inspect
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., object])

defined_in: dict[Callable[..., object], str] = {}
"""The modules that define the public classes and functions, for those who look for doctests."""


def public_in(module: str = "") -> Callable[[T], T]:
    """Return a decorator for what users find in `gradclip`, or in this module of it. It stands above all others."""

    def say_so(found: T) -> T:
        if isinstance(found, type):
            _with_types(found)
            if "__firstlineno__" in vars(found):  # or Python 3.13 shows a line of the public module as its source
                del found.__firstlineno__  # type: ignore[attr-defined]
        else:
            _with_types_of_call(found)
        defined_in[found] = found.__module__
        found.__module__ = f"gradclip.{module}" if module else "gradclip"
        return found

    return say_so


def _with_types(found: type) -> None:
    """Look up the types that a class states as text, as long as it says where it is defined."""
    stated = inspect.get_annotations(found)
    if not stated:
        return
    as_text = {name: getattr(kind, "__forward_arg__", kind) for name, kind in stated.items()}  # of named tuples
    found.__annotations__ = as_text
    found.__annotations__ = inspect.get_annotations(found, locals={found.__name__: found}, eval_str=True)
    for name, own in vars(found).get("__dataclass_fields__", {}).items():  # pydantic reads the types of these
        own.type = found.__annotations__.get(name, own.type)


def _with_types_of_call(found: Callable[..., object]) -> None:
    """Look up the types of a function's arguments, which are text. Help shows that text; pydantic reads the types."""
    found.__signature__ = inspect.signature(found)  # type: ignore[attr-defined]
    found.__annotations__ = inspect.get_annotations(inspect.unwrap(found), eval_str=True)


public = public_in()
record = public_in("typing")
"""For what public calls return beside their results. `gradclip.typing` lists them."""
