"""Exact noise in JAX's compiled programs, by a callback that is run once for each run of the program."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from gradclip._src.private.noise.exact import AskedNoise


def called_back(leaves: Sequence[Any], asked: AskedNoise) -> list[jax.Array]:
    """Return traced arrays plus noise. For arrays on several devices it is drawn for the first, and sent to all."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "in jax.shard_map each device would draw its own noise, and together they would release the sum several "
            "times. Return the sum from it, and call add_noise on that, within the same jax.jit if you like."
        )
    if any(getattr(jax.typeof(x).sharding.spec, "unreduced", None) for x in leaves):
        raise ValueError("the sum is not added up yet, its devices hold terms of it. Call jax.sharding.reshard on it.")
    noise = asked.of(leaves)
    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    noised = io_callback(lambda *given: noise.added([np.asarray(x) for x in given]), kinds, *leaves)
    # What a callback returns lies on the first device, and a program may return it so, with zeros on the others.
    # Results of any operation are sent to all.
    noised = jax.lax.optimization_barrier(noised)
    return [_laid_out_as(x, leaf) for x, leaf in zip(noised, leaves, strict=True)]


def _laid_out_as(x: jax.Array, leaf: jax.Array) -> jax.Array:
    sharding = jax.typeof(leaf).sharding
    return x if sharding == jax.typeof(x).sharding else jax.sharding.reshard(x, sharding)
