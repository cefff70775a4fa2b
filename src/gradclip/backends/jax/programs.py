"""Programs that JAX compiled for eager calls, kept for later calls of the same shapes and settings."""

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
    """Return `run(*args)`, a tree of arrays and a list of dtypes, by a program that is kept where that can be.

    `run` is traced once for each shape; `setting` is what else it depends on. It runs as it is while JAX traces, for
    arrays on several devices, for objects that may change, and where it looks at values.
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
        except (TypeError, IndexError):  # JAX's errors for values that are looked at, or the function's own
            programs[key] = None  # so that the next call does not trace in vain again
        else:
            return made, [x.dtype for x in of_dtypes]
    return run(*args)


def _with_arrays(made: Made) -> tuple[Any, list[jax.Array]]:
    # A program returns arrays alone, so an empty array stands for each dtype.
    return made[0], [jnp.zeros(0, dtype) for dtype in made[1]]


def _eager() -> bool:
    """Say whether nothing is traced: a function may close over what is, and a program must not keep it."""
    # Before JAX 0.10 it stood in jax.core.
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
    """Return a key of all that is no array, the arrays, and what puts them together; None where one cannot be kept."""
    leaves, structure = jax.tree.flatten((list(args), setting), is_leaf=lambda x: x is None)
    carries = [axis for arg, axis in zip((*args, setting), (*axes, None), strict=True) for _ in _leaves(arg)]
    dynamic = [_is_array(x, carries_rows=axis is not None) for x, axis in zip(leaves, carries, strict=True)]
    fixed = [None if is_array else x for x, is_array in zip(leaves, dynamic, strict=True)]
    known = all(isinstance(x, _CONSTANTS) or _is_function(x) for x in fixed)
    # `run` holds the settings itself. A program would keep the values that an array among them has now.
    if not known or any(map(_is_array, _leaves(setting))):
        return None, [], None

    def rebuild(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        whole = [next(rest) if is_array else x for x, is_array in zip(fixed, dynamic, strict=True)]
        return jax.tree.unflatten(structure, whole)[0]

    # 1, 1.0 and True are equal, as are zeros of both signs.
    named = tuple((type(x), repr(x) if isinstance(x, int | float | complex) else x) for x in fixed)
    arrays = [x for x, is_array in zip(leaves, dynamic, strict=True) if is_array]
    return (structure, tuple(dynamic), named), arrays, rebuild


def _leaves(tree: object) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _is_array(x: object, carries_rows: bool = False) -> bool:
    """Say whether a program may take a leaf as an array, without another dtype than in the function itself."""
    if isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, jax.Array):
        return len(x.devices()) == 1
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "biufcV":
        return False
    # JAX would turn a float64 array of NumPy into float32, where the function itself might compute in float64.
    return carries_rows or jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype


def _is_function(x: object) -> bool:
    with contextlib.suppress(TypeError):
        hash(x)
        return callable(x)
    return False
