"""The JAX entry for the registry."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.host.backend import dtype_named
from gradclip._src.backends.jax.trees import JAX_TREES, JaxTrees
from gradclip._src.core.formats import bare_name
from gradclip._src.core.protocols import Backend

_copied = jax.jit(jnp.copy)  # ten times faster than without jit


class Jax(Framework):
    """JAX arrays on any device, and traced arrays."""

    namespace = jnp

    @property
    def trees(self) -> JaxTrees:
        return JAX_TREES

    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> Backend:
        from gradclip._src.backends.jax.host import backend  # not needed before there are JAX arrays

        return backend(leaves, scalars)

    def on_host(self, leaf: jax.Array) -> HostArray:
        return HostArray.of(np.asarray(leaf))

    def numbers(self, leaves: Sequence[jax.Array]) -> list[np.ndarray]:
        for leaf in leaves:
            leaf.copy_to_host_async()
        return super().numbers(leaves)

    def kept(self, array: jax.Array) -> jax.Array:
        # If an array spans processes, copy the local part: a program on the whole array must run on all processes.
        return _copied(array if array.is_fully_addressable else array.addressable_data(0))

    def beside(self, array: jax.Array, like: jax.Array) -> jax.Array:
        values = jax.lax.stop_gradient(array)
        if self.is_traced(array) or self.is_traced(like):
            return values
        there = array.sharding == like.sharding if array.shape == like.shape else array.devices() == like.devices()
        return values if there else jax.device_put(values, like.sharding)

    def is_traced(self, array: object) -> bool:
        return isinstance(array, jax.core.Tracer)

    generator = "a JAX key"

    def noised(self, leaves: Sequence[jax.Array], std: float, rng: Any) -> list[jax.Array] | None:
        if not isinstance(rng, jax.Array):
            return None

        def noised(x: jax.Array, key: jax.Array) -> jax.Array:
            wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
            return (x.astype(wide) + std * jax.random.normal(key, x.shape, wide)).astype(x.dtype)

        return list(map(noised, leaves, jax.random.split(rng, len(leaves))))

    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> jax.Array:
        made = jnp.asarray(values.astype(dtype_named(dtype)))
        # In 32-bit mode, JAX silently narrows float64.
        if bare_name(made.dtype) != dtype:
            raise ValueError(f"JAX has no {dtype} in 32-bit mode. Enable jax_enable_x64, or remove it from dtypes.")
        return made

    def zeros(self, shape: tuple[int, ...], leaf: Any) -> jax.Array:
        return jnp.zeros(shape, leaf.dtype)

    def as_float(self, array: jax.Array) -> jax.Array:
        return array.astype(jnp.result_type(float))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function)


JAX = Jax()
