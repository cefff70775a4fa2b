"""Helpers for the wording of errors."""

import sys
import warnings
from collections.abc import Callable, Sequence, Sized
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MOST_LISTED = 10
_LONGEST_SHOWN = 80


def listed(items: Sequence[Any], separator: str = ", ") -> str:
    """Return a list of items for an error: the first ten, and how many more there are."""
    more = len(items) - _MOST_LISTED
    return separator.join([*map(str, items[:_MOST_LISTED]), *([f"and {more} more"] if more > 0 else [])])


def shown(value: object) -> str:
    """Return the text of a value for an error, in one line: its whole `repr` if that is short, or else what it is."""
    return _short_repr(value) or _described(value)


def typed(value: object) -> str:
    """Return the text of a value for an error, with its type."""
    text = _short_repr(value)
    return f"{text} of type {type(value).__name__}" if text else _described(value)


def printable(text: object, longest: int | None = None) -> str:
    """Return text from files, logs or errors as it can be shown: cut if it is long, and control characters escaped."""
    words = str(text)
    words = words if longest is None or len(words) <= longest else f"{words[: longest - 3]}..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in words)


def _short_repr(value: object) -> str:
    """Return the `repr` of a value in one line; empty if it is long, or fails as for deleted arrays."""
    try:
        text = repr(value)
    except Exception:
        return ""
    text = text if isinstance(value, str | bytes) else " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else ""


def _described(value: object) -> str:
    """Return what a value is: its type, and its shape or its size."""
    kind = type(value).__name__
    if isinstance(value, int):
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return f"a {kind} of {len(value):,} characters that begins with {value[:40]!r}"
    try:
        shape: Any = getattr(value, "shape", None)
        if shape is not None:
            dtype = str(getattr(value, "dtype", "none")).removeprefix("torch.")
            return f"an array of type {kind}, shape {tuple(shape)} and dtype {dtype}"
        size = len(value) if isinstance(value, Sized) else None
    except Exception:
        size = None
    return f"an object of type {kind}" if size is None else f"an object of type {kind} with {size:,} entries"


def with_advice(function: Callable[P, R]) -> Callable[P, R]:
    """If a call of the function fails on a keyword of another library, make the error name gradclip's own."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            from gradclip._src.advice import raise_advice  # loaded only after an error

            raise_advice(function, args, kwargs)
            raise

    return call


def advised(made: type[R]) -> type[R]:
    """Make the error of a class that gets a keyword of another library name its own."""
    setattr(made, "__init__", with_advice(made.__init__))  # noqa: B010  # mypy refuses the assignment
    return made


def no_attribute(name: str, module: ModuleType) -> AttributeError:
    """Return the error for a name that gradclip or its integrations lack, with advice if other libraries have it."""
    message = f"module {module.__name__!r} has no attribute {name!r}"
    if advice := _advice_on_name(name, module.__name__):
        # Without `obj=`, or Python appends a similar name to the advice.
        return AttributeError(f"{message}. {advice}", name=name)
    return AttributeError(message, name=name, obj=module)


def warn_of_retired(old: str, new: str, gone_in: str) -> None:
    """Warn the user's code that it uses a name, which goes in a version, and say what to use instead."""
    told = f"gradclip.{old} is retired and goes in {gone_in}. Use gradclip.{new}."
    warnings.warn(told, DeprecationWarning, stacklevel=level_of_caller())


class AdviceFinder:
    """Make imports of X from `gradclip` or its integrations fail with advice, if X is a name of another library.

    Python asks the finders in `sys.meta_path` for a module one after the other. This one is the last.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing. Raise a ModuleNotFoundError for a name with advice."""
        package, _, last = name.rpartition(".")
        advised = package.removesuffix(".torch").removesuffix(".integrations") == "gradclip"
        if advised and (advice := _advice_on_name(last, package)):
            # Without `name=`: `from gradclip import X` replaces an error that names X by one without advice.
            raise ModuleNotFoundError(f"{package} has no {last!r}. {advice}")


def advise_on_imports() -> None:
    """Add an `AdviceFinder` to those of Python, once."""
    if not any(isinstance(finder, AdviceFinder) for finder in sys.meta_path):
        sys.meta_path.append(AdviceFinder())


def _advice_on_name(name: str, module: str) -> str:
    from gradclip._src.advice import advice_on_name  # loaded only after an error

    return advice_on_name(name, module)


def level_of_caller() -> int:
    """Return the `stacklevel` with which the calling function warns about the code that called gradclip."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "gradclip":
        frame, level = frame.f_back, level + 1
    return level
