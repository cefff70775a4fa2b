"""Run functions with IEEE 754 arithmetic, whatever mode the caller has set for the thread.

`torch.set_flush_denormal(True)`, and libraries compiled for speed, make the processor treat subnormal numbers as zeros,
also in NumPy and in Python itself. The bound, which is proven for all numbers, would then not hold for these.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SMALLEST_NORMAL = 2.0**-1022
_callers = threading.local()


def _never() -> bool:
    return False


_being_compiled: Callable[[], bool] = _never


def ask_whether_compiling(being_compiled: Callable[[], bool]) -> None:
    """Set the function that says whether a call is being compiled. The registry of frameworks does."""
    global _being_compiled
    _being_compiled = being_compiled


def being_compiled() -> bool:
    """Say whether a framework is tracing this call to compile it."""
    return _being_compiled()


def flushes() -> bool:
    """Return whether this thread treats subnormal numbers as zeros, as inputs or as results."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def caller_flushes() -> bool:
    """Return the same for the thread as it was before the call of a function with `with_subnormals`."""
    return getattr(_callers, "flush", False) or flushes()


def with_subnormals(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function compute with subnormal numbers, then restore the thread's mode.

    While a function is compiled, for example by `torch.compile`, nothing is computed yet and the mode is left alone. If
    a caller passes a keyword that other libraries have, the error names gradclip's own.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if _SMALLEST_NORMAL * 0.5 != 0.0 or _being_compiled():
                return function(*args, **kwargs)
            with _subnormals_on():
                return function(*args, **kwargs)
        except TypeError:
            from gradclip.advice import raise_advice  # loaded only after an error

            raise_advice(function, kwargs)
            raise

    return call


@contextmanager
def _subnormals_on() -> Iterator[None]:
    library = _library()
    if library is None:
        yield
        return
    functions, default = library
    before = ctypes.create_string_buffer(512)  # larger than any `fenv_t`
    functions.fegetenv(before)
    functions.fesetenv(default)
    _callers.flush = True
    try:
        yield
    finally:
        _callers.flush = False
        functions.fesetenv(before)


@cache
def _library() -> tuple[Any, Any] | None:
    """Return the C library and the address of its default environment; None if it has none, as on Windows."""
    try:
        functions = ctypes.PyDLL(None)
        functions.fegetenv, functions.fesetenv  # noqa: B018
    except (AttributeError, OSError, TypeError):
        return None
    try:
        return functions, ctypes.byref(ctypes.c_char.in_dll(functions, "_FE_DFL_ENV"))  # macOS
    except ValueError:
        return functions, ctypes.c_void_p(-1)  # glibc and musl
