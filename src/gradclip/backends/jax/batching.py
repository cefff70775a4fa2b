"""Functions of one example over a batch, for JAX: `jax.vmap`, and microbatches in a loop that is compiled once.

A microbatch is a slice of the batch. The last one is filled up with rows that the mask leaves out. One compiled program
serves all microbatches: it does not contain the code that cuts them out, so a long batch is not copied.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.backends.batching import Programs, Step
from gradclip.backends.jax.axes import varying_alike
from gradclip.backends.jax.programs import by_program


class JaxBatching:
    """The verbs of `Batching`."""

    keeps_whole_batches = False
    modules_called = "model.apply(parameters, x) does"

    def with_gradient(self, fun: Callable[..., Any], argnums: int | tuple[int, ...]) -> Callable[..., Any]:
        call = jax.value_and_grad(fun, argnums, has_aux=True)

        def gradient(*args: object, **kwargs: object) -> Any:
            kept, grads = call(*args, **kwargs)
            return grads, kept

        return gradient

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Hashable
    ) -> Callable[..., Any]:
        # Else `jax.grad` would add up the gradients of all devices for an argument that each of them has a copy of.
        call = jax.vmap(fun, in_axes=tuple(axes), spmd_axis_name=spmd_axis_name)
        return lambda *args: call(*varying_alike(*args))

    def unused(
        self, fun: Callable[..., Any], args: Sequence[Any], axes: Sequence[int | None], summed: object
    ) -> list[str]:
        return []

    def split_key(self, key: object, count: int) -> Any:
        return jax.tree.map(lambda one: jax.random.split(one, count), key)

    def flags(self, mask: object) -> jax.Array:
        return jnp.asarray(mask, bool)

    def blanked(self, tree: object, mask: jax.Array) -> Any:
        def rows(x: jax.Array) -> jax.Array:
            return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

        return jax.tree.map(rows, tree)

    def cast(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return x.astype(dtype)

    def padded(
        self, args: Sequence[Any], axes: Sequence[int | None], mask: jax.Array | None, count: int, size: int
    ) -> tuple[tuple[Any, ...], jax.Array]:
        def longer(x: jax.Array) -> jax.Array:
            x = jnp.asarray(x)
            # `lax.full` makes rows of random keys as well, which `jnp.pad` does not.
            return jnp.concatenate([x, lax.full((size - count, *x.shape[1:]), 0, x.dtype)]) if size > count else x

        many = [arg if axis is None else jax.tree.map(longer, arg) for arg, axis in zip(args, axes, strict=True)]
        return tuple(_apart(many, axes)), longer(jnp.ones(count, bool) if mask is None else mask)

    def at_once(
        self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: jax.Array | None, count: int
    ) -> Any:
        return step(args, mask)

    def in_microbatches(
        self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: jax.Array | None, count: int, size: int
    ) -> tuple[Any, Any]:
        number = -(-count // size)  # rounded up
        # Trailing microbatches without an example are skipped: padding to one shape then costs no time.
        if mask is not None:
            number = -(-jnp.max(jnp.where(mask, jnp.arange(1, count + 1), 0), initial=0) // size)
        if count < size:
            args, mask = self.padded(args, axes, mask, count, size)
        rows = max(count, size)

        def microbatch(i: jax.Array | int) -> tuple[Any, Any]:
            here = [arg if axis is None else _rows(arg, i, size, rows) for arg, axis in zip(args, axes, strict=True)]
            # The last microbatch may repeat the last row, which must count once.
            fresh = i * size + jnp.arange(size) < rows
            counted = fresh if mask is None else fresh & _rows(mask, i, size, rows)
            return lax.optimization_barrier(step(_apart(here, axes), counted))

        def body(i: jax.Array | int, carry: tuple[Any, Any]) -> Any:
            summed, outputs = microbatch(i)
            put = partial(lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
            return jax.tree.map(jnp.add, carry[0], summed), jax.tree.map(put, carry[1], outputs)

        sums, outputs = jax.eval_shape(microbatch, 0)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        # Room for whole microbatches: an update that would not fit is moved back by XLA, over rows already written.
        places = -(-rows // size) * size
        blank = jax.tree.map(lambda x: jnp.zeros((places, *x.shape[1:]), x.dtype), outputs)
        # A loop in `shard_map` wants its carry to vary over the same axes before and after each turn.
        _, empty, blank = varying_alike(args, empty, blank)
        return lax.fori_loop(0, number, body, (empty, blank))

    def kept(
        self,
        programs: Programs,
        setting: object,
        run: Callable[..., Any],
        axes: Sequence[int | None],
        args: Sequence[Any],
    ) -> Any:
        return by_program(programs, setting, run, axes, args)


class JaxLoop(JaxBatching):
    """The verbs with `jax.lax.map` for `jax.vmap`: one example after the other, in a loop that is compiled once."""

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Hashable
    ) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            args = tuple(varying_alike(*args))

            def of_one(rows: Sequence[Any]) -> Any:
                rest = iter(rows)
                return fun(*[arg if axis is None else next(rest) for axis, arg in zip(axes, args, strict=True)])

            return lax.map(of_one, [arg for axis, arg in zip(axes, args, strict=True) if axis is not None])

        return call


def _rows(tree: object, i: jax.Array | int, size: int, rows: int) -> Any:
    """Return the microbatch of number `i`; beyond the last row it repeats that row."""
    # Where the last microbatch is shorter, XLA would move its slice back, over rows that have been counted.
    if rows % size == 0:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), i * size, size), tree)
    places = jnp.minimum(i * size + jnp.arange(size), rows - 1)
    return jax.tree.map(lambda x: jnp.asarray(x)[places], tree)


def _apart(args: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Return the arguments behind a barrier, so that XLA compiles what follows the same for every number of rows."""
    return [arg if axis is None else lax.optimization_barrier(arg) for arg, axis in zip(args, axes, strict=True)]
