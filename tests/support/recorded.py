"""Ways to record a function of one vector, and to run the recording."""

import jax
import jax.numpy as jnp
import torch
from torch.fx.experimental.proxy_tensor import make_fx


def recorded(name):
    """Return a way to record a function of one vector, and to run the recording."""
    if name == "tf.function":
        import tensorflow as tf

        return lambda fun: tf.function(fun)(tf.zeros(2))
    if name == "mlx.compile":
        import mlx.core as mx

        return lambda fun: mx.compile(fun)(mx.ones(2))
    return {
        "jax.jit": lambda fun: jax.jit(fun)(jnp.ones(2)),
        "jax.vmap": lambda fun: jax.vmap(fun)(jnp.ones((2, 2))),
        "torch.compile": lambda fun: torch.compile(fun, backend="eager")(torch.ones(2)),
        "torch.vmap": lambda fun: torch.vmap(fun, randomness="same")(torch.ones(2, 2)),
        "make_fx": lambda fun: make_fx(fun)(torch.ones(2)),
    }[name]
