"""Functions of one example over a batch, for JAX: `jax.vmap`, and microbatches in a loop that is compiled once.

A microbatch is a slice of the batch. The last one is padded with rows that the mask leaves out. All microbatches run
one compiled program. Slicing happens outside that program, so a long batch is not copied.

Compiled programs of eager calls are reused for later calls.
A program is found in one of two ways. By its arguments: then nothing is traced. Or, if the result may depend on values
that a key cannot hold, by its text: the call is traced again, and compiled only if no earlier call gave the same text.
"""

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradclip._src.backends.jax.placement import varying_alike
from gradclip._src.private.batching.verbs import (
    Args,
    Axes,
    Batching,
    Function,
    Made,
    Programs,
    Run,
    Step,
    Transform,
    named,
    transformed,
)

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


READS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class JaxBatching(Batching):
    """`Batching` for JAX."""

    modules_called = "model.apply(parameters, x) does"

    def with_gradient(self, fun: Function, argnums: int | tuple[int, ...], transform: Transform | None) -> Function:
        call = jax.value_and_grad(fun, argnums, has_aux=True)

        def gradient(*args: object, **kwargs: object) -> Any:
            with reading_explained():
                kept, grads = call(*args, **kwargs)
            return grads, kept

        return transformed(gradient, transform)

    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        # Without `varying_alike`, `jax.grad` would sum the gradients of a replicated argument over all devices.
        call = jax.vmap(fun, in_axes=tuple(axes), spmd_axis_name=spmd_axis_name)
        return lambda *args: call(*varying_alike(*args))

    def keys(self, key: object, count: int) -> Any:
        # `jax.random.split` may return other keys for another count.
        return jax.tree.map(lambda one: jax.vmap(partial(jax.random.fold_in, one))(jnp.arange(count)), key)

    def flags(self, mask: object) -> jax.Array:
        return jnp.asarray(mask, bool)

    def blanked(self, tree: object, mask: jax.Array) -> Any:
        def rows(x: jax.Array) -> jax.Array:
            return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

        return jax.tree.map(rows, tree)

    def padded(
        self, args: Args, axes: Axes, mask: jax.Array | None, count: int, size: int
    ) -> tuple[tuple[Any, ...], jax.Array]:
        missing = size - count

        def longer(x: jax.Array) -> jax.Array:
            x = jnp.asarray(x)
            shape = (missing, *x.shape[1:])
            # Unlike `jnp.pad`, these also make rows of random keys.
            rest = jnp.broadcast_to(x[-1:], shape) if count else lax.full(shape, 0, x.dtype)
            return jnp.concatenate([x, rest]) if missing else x

        many = [arg if axis is None else jax.tree.map(longer, arg) for arg, axis in zip(args, axes, strict=True)]
        real = jnp.ones(count, bool) if mask is None else mask
        return tuple(_apart(many, axes)), jnp.concatenate([real, jnp.zeros(missing, bool)]) if missing else real

    def at_once(self, step: Step, args: Args, axes: Axes, mask: jax.Array | None, count: int) -> Any:
        return step(args, mask)

    def in_microbatches(
        self, step: Step, args: Args, axes: Axes, mask: jax.Array | None, count: int, size: int
    ) -> tuple[Any, Any]:
        number = -(-count // size)  # rounded up
        # Trailing microbatches without examples are skipped, so padding to one shape costs no time.
        if mask is not None:
            number = -(-jnp.max(jnp.where(mask, jnp.arange(1, count + 1), 0), initial=0) // size)
        if count < size:
            args, mask = self.padded(args, axes, mask, count, size)
        rows = max(count, size)

        def microbatch(i: jax.Array | int) -> tuple[Any, Any]:
            here = [arg if axis is None else _rows(arg, i, size, rows) for arg, axis in zip(args, axes, strict=True)]
            # The last microbatch may repeat the last row. Count that row once.
            fresh = i * size + jnp.arange(size) < rows
            counted = fresh if mask is None else fresh & _rows(mask, i, size, rows)
            return lax.optimization_barrier(step(_apart(here, axes), counted))

        def body(i: jax.Array | int, carry: tuple[Any, Any]) -> Any:
            summed, outputs = microbatch(i)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
            return jax.tree.map(_sum, carry[0], summed), jax.tree.map(put, carry[1], outputs)

        sums, outputs = jax.eval_shape(microbatch, 0)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        # Make room for whole microbatches. XLA moves an update that does not fit back, over rows already written.
        places = -(-rows // size) * size
        blank = jax.tree.map(lambda x: jnp.zeros((places, *x.shape[1:]), x.dtype), outputs)
        # Inside `shard_map`, the carry of a loop must vary over the same axes before and after each iteration.
        _, empty, blank = varying_alike(args, empty, blank)
        return lax.fori_loop(0, number, body, (empty, blank))

    def kept(self, programs: Programs, setting: object, run: Run, axes: Axes, args: Args) -> Made:
        return by_program(programs, setting, run, axes, args)


class JaxLoop(JaxBatching):
    """`Batching` with `jax.lax.map` instead of `jax.vmap`: one example at a time, in a loop that is compiled once."""

    keeps_whole_batches = True  # outside traced code, JAX would compile the loop again at every call

    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        def call(*args: object) -> Any:
            args = tuple(varying_alike(*args))

            def of_one(rows: Sequence[Any]) -> Any:
                rest = iter(rows)
                given = [arg if axis is None else next(rest) for axis, arg in zip(axes, args, strict=True)]
                # Without barriers, XLA might compile a loop of one example in another way.
                return lax.optimization_barrier(fun(*_apart(given, axes)))

            return lax.map(of_one, [arg for axis, arg in zip(axes, args, strict=True) if axis is not None])

        return call


@contextmanager
def reading_explained() -> Iterator[None]:
    """Add to errors of a function that reads values while it is traced what to write instead."""
    try:
        yield
    except READS_VALUES as error:
        error.add_note(
            "gradclip has JAX trace the loss, as jax.jit does, so it must not read values. Return the array without "
            ".item() or float(). Write jnp.where or jax.lax.cond for `if`, and jax.numpy for numpy."
        )
        raise


def _rows(tree: object, i: jax.Array | int, size: int, rows: int) -> Any:
    """Return microbatch `i`. Past the end of the batch, it repeats the last row."""
    # If the last microbatch is shorter, XLA would move its slice back, over rows already counted.
    if rows % size == 0:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), i * size, size), tree)
    places = jnp.minimum(i * size + jnp.arange(size), rows - 1)
    return jax.tree.map(lambda x: jnp.asarray(x)[places], tree)


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    return x if x.dtype == jax.dtypes.float0 else x + y  # `float0` holds no numbers


def _apart(args: Args, axes: Axes) -> list[Any]:
    """Put the arguments behind a barrier, so that XLA compiles the code after it alike for every number of rows."""
    return [arg if axis is None else lax.optimization_barrier(arg) for arg, axis in zip(args, axes, strict=True)]
