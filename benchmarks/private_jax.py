"""What private_steps.py measures in JAX: the compiled contenders of a network, and their memory."""

from functools import partial

import jax
import jax_privacy.clipping
import numpy as np
import optax
from private_networks import NOISED, OURS, PLAIN, taken
from private_ours import clipped, with_noise


class Program:
    """A compiled function and its arguments."""

    def __init__(self, function, arguments):
        self.compiled, self.arguments = jax.jit(function).lower(*arguments).compile(), arguments

    def __call__(self):
        return jax.block_until_ready(self.compiled(*self.arguments))

    def memory(self):
        """Return the bytes of the temporary buffers, which are known before the first call."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    needs = memory


class Noised:
    """A program that returns a sum, and then noise, which has memory of its own."""

    def __init__(self, program, size):
        self.needs, self.memory = program.needs, program.memory
        self.noised = with_noise(program, size)

    def __call__(self):
        return jax.block_until_ready(self.noised())


def contenders(network, batch):
    """Return functions that make contenders, by name. They raise an error where a contender does not support it."""
    params, loss = network()
    mask = taken(len(batch[0]))
    arguments = jax.device_put((params, *(x if x.dtype == np.float32 else x.astype(np.int32) for x in batch), mask))
    made = {name: lambda make=make: Program(make(), arguments) for name, make in functions(loss, len(mask)).items()}
    return {**made, NOISED: lambda: Noised(made[next(iter(OURS))](), len(mask))}


def functions(loss, size):
    """Return functions that return functions of parameters, features, labels and a mask."""

    def ours(method, **settings):
        made = clipped(loss, size, method, **settings)
        return lambda p, x, y, mask: made(p, x, y, mask=mask)

    def of_example(p, x, y):
        return jax.grad(loss)(p, x[None], y[None])

    def with_optax(p, x, y, mask):
        return optax.per_example_global_norm_clip(jax.vmap(of_example, in_axes=(None, 0, 0))(p, x, y), 1.0)[0]

    def with_jax_privacy():
        theirs = jax_privacy.clipping.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
        return lambda p, x, y, mask: theirs(p, x, y, is_padding_example=~mask)

    return {
        PLAIN: lambda: lambda p, x, y, mask: jax.grad(loss)(p, x, y),
        **{name: partial(ours, method) for name, method in OURS.items()},
        "jax.vmap and optax": lambda: with_optax,
        "jax_privacy": with_jax_privacy,
    }
