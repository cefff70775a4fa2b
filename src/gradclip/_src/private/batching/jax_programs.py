"""Compiled JAX programs of eager calls, reused for later calls.

A program is found in one of two ways. By its arguments: then nothing is traced. Or, if the result may depend on values
that a key cannot hold, by its text: the call is traced again, and compiled only if no earlier call gave the same text.
"""

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from gradclip._src.private.batching.verbs import Args, Axes, Made, Programs, Run, named

# Raised by JAX when `run` reads values of traced arrays, or by `run` itself.
_READS_VALUES = (TypeError, IndexError)


def by_program(programs: Programs, setting: object, run: Run, axes: Axes, args: Args) -> Made:
    """Return `run(*args)`, a tree of arrays and a list of dtypes. Reuse a compiled program if possible.

    `setting` is everything else that the result depends on. `run` is called without compiling while JAX traces, where
    `jax.disable_jit` forbids it, and if it calls back to Python.
    """
    if not eager() or jax.config.jax_disable_jit:
        return run(*args)
    arrays_too = _Parted.of(axes, args, lambda x, carries: _is_array(x, carries_rows=carries))
    key = _key(arrays_too, setting)
    if key is not None:
        if key not in programs:
            without = replace(arrays_too, arrays=[])  # a program must not keep this call's arrays
            programs.keep(key, jax.jit(lambda arrays: _with_arrays(run(*without.rebuilt(arrays)))))
        program = programs[key]
        if program is not None:
            try:
                made, of_dtypes = program(arrays_too.arrays)
            except _READS_VALUES:
                programs[key] = None  # do not try it again at the next call
            else:
                return made, [x.dtype for x in of_dtypes]
    # The second time, `run` may read the values of all arguments that do not carry the batch.
    rows_alone = _Parted.of(axes, args, lambda x, carries: carries and _is_array(x, carries_rows=True))
    for parted in (arrays_too, rows_alone):
        with contextlib.suppress(*_READS_VALUES):
            return _by_text(programs, run, parted)
    return run(*args)


def _by_text(programs: Programs, run: Run, parted: "_Parted") -> Made:
    """Return `run(*args)`. Trace it now, so that it sees the current values of everything that is not an array."""
    traced: list[tuple[Any, list[Any]]] = []

    def flat_run(arrays: Sequence[Any]) -> list[jax.Array]:
        made, dtypes = run(*parted.rebuilt(arrays))
        leaves, structure = jax.tree.flatten(made)
        traced.append((structure, dtypes))
        return leaves

    closed = jax.make_jaxpr(flat_run)(parted.arrays)

    def call(values: Sequence[Any], arrays: Sequence[Any]) -> Any:
        # Arrays that the function closes over are arguments of the program, so that it does not depend on their values.
        return jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(closed.jaxpr, values))(*arrays)

    lowered = jax.jit(call).lower(closed.consts, parted.arrays)
    text = lowered.as_text()
    if "callback" in text:  # a program keeps the Python function that it was compiled with
        return run(*parted.rebuilt(parted.arrays))
    key = (hashlib.sha256(text.encode()).digest(), _kinds((*closed.consts, *parted.arrays)), tuple(closed.out_avals))
    if key not in programs:
        programs.keep(key, lowered.compile())
    structure, dtypes = traced[-1]
    return jax.tree.unflatten(structure, programs[key](closed.consts, parted.arrays)), dtypes


def _kinds(arrays: Sequence[Any]) -> Hashable:
    """Return what a program's text leaves out of its arguments: weak types and devices."""
    return tuple((jax.typeof(x), getattr(x, "sharding", None), getattr(x, "committed", None)) for x in arrays)


def _with_arrays(made: Made) -> tuple[Any, list[jax.Array]]:
    # A program can return only arrays, so return an empty array for each dtype.
    return made[0], [jnp.zeros(0, dtype) for dtype in made[1]]


def eager() -> bool:
    """Say whether nothing is being traced. A function may close over tracers, which a program must not keep."""
    # Before JAX 0.10, this function was in jax.core.
    place = jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core
    state = getattr(place, "get_opaque_trace_state", None)
    if state is None:
        return False
    now = state()
    with jax.core.eval_context():
        return bool(now == state())


@dataclass(frozen=True)
class _Parted:
    """Arguments, split into the arrays that a program takes and everything else."""

    structure: Any
    is_array: tuple[bool, ...]
    arrays: list[Any]
    fixed: list[Any]  # None in the place of an array

    @classmethod
    def of(cls, axes: Axes, args: Args, is_array: Callable[[Any, bool], bool]) -> "_Parted":
        leaves, structure = jax.tree.flatten(list(args), is_leaf=lambda x: x is None)
        carries = [axis is not None for arg, axis in zip(args, axes, strict=True) for _ in _leaves(arg)]
        dynamic = tuple(map(is_array, leaves, carries))
        arrays = [x for x, taken in zip(leaves, dynamic, strict=True) if taken]
        return cls(structure, dynamic, arrays, [None if taken else x for x, taken in zip(leaves, dynamic, strict=True)])

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """Return the arguments, with other arrays."""
        rest = iter(arrays)
        whole = [next(rest) if taken else x for x, taken in zip(self.fixed, self.is_array, strict=True)]
        return jax.tree.unflatten(self.structure, whole)


def _key(parted: _Parted, setting: object) -> Hashable | None:
    """Return a key of everything but the arrays; None if something in it may change."""
    leaves, structure = jax.tree.flatten(setting, is_leaf=lambda x: x is None)
    found = [named(x) for x in parted.fixed] + [_Same(x) if isinstance(x, jax.Array) else named(x) for x in leaves]
    return None if None in found else (parted.structure, parted.is_array, structure, tuple(found))


@dataclass(frozen=True, eq=False)
class _Same:
    """An array of JAX in a setting. Its values cannot change, so a program may hold them."""

    array: jax.Array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.array is other.array

    def __hash__(self) -> int:
        return id(self.array)


def _leaves(tree: object) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _is_array(x: object, carries_rows: bool = False) -> bool:
    """Say whether a program may take a leaf as an array with the same dtype as in an eager call."""
    if isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, jax.Array):
        return True
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "biufcV":
        return False
    # JAX would narrow a NumPy float64 array to float32, but the function might compute in float64.
    return carries_rows or jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
