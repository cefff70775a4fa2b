"""Functions of one example over a batch, for JAX: `jax.vmap`, and microbatches in a loop that is compiled once.

A microbatch is a slice of the batch. The last one is padded with rows that the mask leaves out. All microbatches run
one compiled program. Slicing happens outside that program, so a long batch is not copied.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradclip._src.backends.jax.placement import varying_alike
from gradclip._src.private.batching.jax_programs import by_program
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
    transformed,
)

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
