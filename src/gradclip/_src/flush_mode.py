"""Run functions with IEEE 754 arithmetic, whatever mode the caller has set for the thread.

`torch.set_flush_denormal(True)`, and libraries compiled for speed, make the processor treat subnormal numbers as zeros,
also in NumPy and in Python itself. The bound, which is proven for all numbers, would then not hold for these. It is
proven for rounding to nearest, and some libraries for interval arithmetic leave on that results are rounded up or down.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SMALLEST_NORMAL = 2.0**-1022
_TINY = 2.0**-60  # too little to change 1.0, unless sums are rounded in one direction
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
    """Make a function compute with subnormal numbers, rounding to nearest, then restore the thread's mode.

    While a function is compiled, for example by `torch.compile`, nothing is computed yet and the mode is left alone. If
    a caller passes a keyword that other libraries have, the error names gradclip's own.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if (_SMALLEST_NORMAL * 0.5 != 0.0 and 1.0 + _TINY - _TINY == 1.0) or _being_compiled():
                return function(*args, **kwargs)
            return _with_default_arithmetic(function, *args, **kwargs)
        except TypeError:
            from gradclip._src.advice import raise_advice  # loaded only after an error

            raise_advice(function, args, kwargs)
            raise

    return call


def _with_default_arithmetic(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    library = _library()
    if library is None:
        return function(*args, **kwargs)
    functions, default = library
    before = ctypes.create_string_buffer(512)  # larger than any `fenv_t`
    flushed_before, flush = getattr(_callers, "flush", False), flushes()
    functions.fegetenv(before)
    # Signal handlers, which may raise, run only after calls. So the mode is changed by the first call of `try` and
    # restored by the first of `finally`.
    try:
        functions.fesetenv(default)
        _callers.flush = flush
        return function(*args, **kwargs)
    finally:
        _callers.flush = flushed_before
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
