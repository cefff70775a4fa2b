"""Functions of one example over a batch, for JAX: `jax.vmap`, and microbatches in a loop that is compiled once.

A microbatch is a slice of the batch. The last one ends where the batch ends, and masks what the one before it
has seen, so that a batch of any length is neither copied nor padded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradclip.backends.jax_axes import varying_alike
from gradclip.backends.mapping import Step


class JaxMapping:
    """The verbs of `Mapping`."""

    def with_gradient(self, fun: Callable[..., Any], argnums: Any) -> Callable[..., Any]:
        call = jax.value_and_grad(fun, argnums, has_aux=True)

        def gradient(*args: Any, **kwargs: Any) -> Any:
            kept, grads = call(*args, **kwargs)
            return grads, kept

        return gradient

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Any
    ) -> Callable[..., Any]:
        call = jax.vmap(fun, in_axes=tuple(axes), spmd_axis_name=spmd_axis_name)
        return lambda *args: call(*varying_alike(*args))

    def unused(
        self, fun: Callable[..., Any], args: Sequence[Any], axes: Sequence[int | None], summed: Any
    ) -> list[str]:
        return []

    def split_key(self, key: Any, count: int) -> Any:
        return jax.tree.map(lambda one: jax.random.split(one, count), key)

    def flags(self, mask: Any) -> jax.Array:
        return jnp.asarray(mask, bool)

    def blanked(self, tree: Any, mask: jax.Array) -> Any:
        def rows(x: jax.Array) -> jax.Array:
            return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

        return jax.tree.map(rows, tree)

    def cast(self, x: jax.Array, dtype: Any) -> jax.Array:
        return x.astype(dtype)

    def accumulated(
        self, step: Step, args: Sequence[Any], axes: Sequence[int | None], mask: Any, count: int, size: int
    ) -> tuple[Any, Any]:
        if size >= count:
            return step(args, mask)
        rows = jnp.arange(count)

        def microbatch(i: Any) -> tuple[Any, Any, Any, Any]:
            start = jnp.minimum(i * size, count - size)
            fresh = _rows(rows, start, size) >= i * size
            here = [arg if axis is None else _rows(arg, start, size) for arg, axis in zip(args, axes, strict=True)]
            if mask is None:
                return start, fresh, *step(here, fresh if count % size else None)
            return start, fresh, *step(here, fresh & _rows(mask, start, size))

        def body(i: Any, carry: Any) -> Any:
            start, fresh, summed, outputs = microbatch(i)
            put = partial(_put, start=start, fresh=fresh if count % size else None)
            return jax.tree.map(jnp.add, carry[0], summed), jax.tree.map(put, carry[1], outputs)

        _, _, sums, outputs = jax.eval_shape(microbatch, 0)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        blank = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), outputs)
        number = -(-count // size)
        if mask is not None:
            number = -(-jnp.max(jnp.where(mask, rows + 1, 0)) // size)
        _, empty, blank = varying_alike(args, empty, blank)
        return lax.fori_loop(0, number, body, (empty, blank))


class JaxLoop(JaxMapping):
    """The verbs with `jax.lax.map` for `jax.vmap`: one example after the other, in a loop that is compiled once."""

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Any
    ) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            args = tuple(varying_alike(*args))

            def of_one(rows: Sequence[Any]) -> Any:
                rest = iter(rows)
                return fun(*[arg if axis is None else next(rest) for axis, arg in zip(axes, args, strict=True)])

            return lax.map(of_one, [arg for axis, arg in zip(axes, args, strict=True) if axis is not None])

        return call


def _rows(tree: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), start, size), tree)


def _put(whole: jax.Array, part: jax.Array, start: Any, fresh: Any) -> jax.Array:
    """Return `whole` with the rows from `start` replaced, those that are not `fresh` left as they are."""
    if fresh is not None:
        old = lax.dynamic_slice_in_dim(whole, start, part.shape[0])
        part = jnp.where(fresh.reshape(-1, *[1] * (part.ndim - 1)), part, old)
    return lax.dynamic_update_slice_in_dim(whole, part, start, 0)
