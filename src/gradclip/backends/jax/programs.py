"""Compiled JAX programs of eager calls, reused for later calls with the same shapes and settings."""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from gradclip.backends.batching import Programs

# Values of these types cannot change, so they may be part of a program's key.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))

Made = tuple[Any, list[Any]]


def by_program(
    programs: Programs, setting: object, run: Callable[..., Made], axes: Sequence[int | None], args: Sequence[Any]
) -> Made:
    """Return `run(*args)`, a tree of arrays and a list of dtypes. Reuse a compiled program if possible.

    `run` is traced once for each shape. `setting` is everything else that the result depends on. `run` is called
    without compiling while JAX traces, for arrays on several devices, for mutable objects, and if it reads values.
    """
    key, arrays, rebuild = _parted(setting, axes, args) if _eager() else (None, [], None)
    if key is None or rebuild is None:
        return run(*args)
    if key not in programs:
        programs.keep(key, jax.jit(lambda arrays: _with_arrays(run(*rebuild(arrays)))))
    program = programs[key]
    if program is not None:
        try:
            made, of_dtypes = program(arrays)
        except (TypeError, IndexError):  # raised by JAX when `run` reads values, or by `run` itself
            programs[key] = None  # do not try to trace it again at the next call
        else:
            return made, [x.dtype for x in of_dtypes]
    return run(*args)


def _with_arrays(made: Made) -> tuple[Any, list[jax.Array]]:
    # A program can return only arrays, so return an empty array for each dtype.
    return made[0], [jnp.zeros(0, dtype) for dtype in made[1]]


def _eager() -> bool:
    """Say whether nothing is being traced. A function may close over tracers, which a program must not keep."""
    # Before JAX 0.10, this function was in jax.core.
    place = jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core
    state = getattr(place, "get_opaque_trace_state", None)
    if state is None:
        return False
    now = state()
    with jax.core.eval_context():
        return bool(now == state())


def _parted(
    setting: object, axes: Sequence[int | None], args: Sequence[Any]
) -> tuple[Hashable, list[Any], Callable[[Sequence[Any]], Any] | None]:
    """Split the arguments into a key of everything but arrays, the arrays, and a function to rebuild them.

    The key is None if no program can be kept for these arguments.
    """
    leaves, structure = jax.tree.flatten((list(args), setting), is_leaf=lambda x: x is None)
    carries = [axis for arg, axis in zip((*args, setting), (*axes, None), strict=True) for _ in _leaves(arg)]
    dynamic = [_is_array(x, carries_rows=axis is not None) for x, axis in zip(leaves, carries, strict=True)]
    fixed = [None if is_array else x for x, is_array in zip(leaves, dynamic, strict=True)]
    known = all(isinstance(x, _CONSTANTS) or _is_function(x) for x in fixed)
    # `run` uses its own settings. If one of them is an array, a program would keep its current values forever.
    if not known or any(map(_is_array, _leaves(setting))):
        return None, [], None

    def rebuild(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        whole = [next(rest) if is_array else x for x, is_array in zip(fixed, dynamic, strict=True)]
        return jax.tree.unflatten(structure, whole)[0]

    # Types and `repr` tell apart 1, 1.0 and True, and 0.0 and -0.0, which compare equal.
    named = tuple((type(x), repr(x) if isinstance(x, int | float | complex) else x) for x in fixed)
    arrays = [x for x, is_array in zip(leaves, dynamic, strict=True) if is_array]
    return (structure, tuple(dynamic), named), arrays, rebuild


def _leaves(tree: object) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _is_array(x: object, carries_rows: bool = False) -> bool:
    """Say whether a program may take a leaf as an array with the same dtype as in an eager call."""
    if isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, jax.Array):
        return len(x.devices()) == 1
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "biufcV":
        return False
    # JAX would narrow a NumPy float64 array to float32, but the function might compute in float64.
    return carries_rows or jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype


def _is_function(x: object) -> bool:
    with contextlib.suppress(TypeError):
        hash(x)
        return callable(x)
    return False
