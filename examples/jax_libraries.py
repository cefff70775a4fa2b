"""Clip the gradient of each example in Flax NNX, Equinox and Haiku: what each library passes as parameters.

The three train the same network on the same batches, with the noise of private training.
"""

import equinox
import haiku
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gradclip

STEPS = 60
BATCH = 64
MAX_NORM = 1.0
NOISE_MULTIPLIER = 0.5


def flax_nnx():
    """Return the parameters of a Flax NNX model, and its loss as a function of them."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 1, rngs=rngs))
    # Whatever is no parameter, such as random keys and counters, is not differentiated.
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def loss(parameters, x, y):
        return jnp.mean((nnx.merge(graph, parameters, rest)(x) - y) ** 2)

    return parameters, loss


def with_equinox():
    """Return the arrays of an Equinox model that have gradients, and its loss as a function of them."""
    model = equinox.nn.MLP(4, 1, 32, depth=1, key=jax.random.key(0))
    parameters, static = equinox.partition(model, equinox.is_inexact_array)

    def loss(parameters, x, y):
        return jnp.mean((jax.vmap(equinox.combine(parameters, static))(x) - y) ** 2)

    return parameters, loss


def with_haiku():
    """Return the parameters of a Haiku model, and its loss as a function of them."""
    network = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([32, 1])(x)))

    def loss(parameters, x, y):
        return jnp.mean((network.apply(parameters, x) - y) ** 2)

    return network.init(jax.random.key(0), jnp.zeros((1, 4))), loss


def train(parameters, loss):
    """Take private steps; return the loss of all data before and after, and the share of clipped gradients."""
    inputs = jax.random.normal(jax.random.key(1), (1024, 4))
    targets = inputs[:, :1] * 2.0 + 1.0
    clipped = gradclip.clipped_grad(loss, MAX_NORM, batch_argnums=(1, 2), pad_to=BATCH, return_norms=True)
    std = clipped.sensitivity(layout=gradclip.SumLayout(elements=parameters)).noise_std(NOISE_MULTIPLIER)
    optimizer = optax.adam(0.05)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, key):
        chosen, noise_key = jax.random.split(key)
        rows = jax.random.permutation(chosen, len(inputs))[:BATCH]
        summed, outputs = clipped(parameters, inputs[rows], targets[rows])
        leaves, structure = jax.tree.flatten(summed)
        keys = jax.random.split(noise_key, len(leaves))
        noisy = [(x + std * jax.random.normal(k, x.shape)) / BATCH for x, k in zip(leaves, keys, strict=True)]
        updates, state = optimizer.update(jax.tree.unflatten(structure, noisy), state)
        return optax.apply_updates(parameters, updates), state, jnp.mean(outputs.norms > MAX_NORM)

    first, share = loss(parameters, inputs, targets), 0.0
    for key in jax.random.split(jax.random.key(2), STEPS):
        parameters, state, above = step(parameters, state, key)
        share += above / STEPS
    return first, loss(parameters, inputs, targets), share, std


def main():
    print(f"{STEPS} steps, each gradient clipped to norm {MAX_NORM:g}, noise multiplier {NOISE_MULTIPLIER:g}")
    for name, make in (("Flax NNX", flax_nnx), ("Equinox", with_equinox), ("Haiku", with_haiku)):
        first, last, share, std = train(*make())
        print(f"{name}: loss {first:.3f}, then {last:.3f}; {share:.0%} of the gradients clipped; noise {std:.5f}")


if __name__ == "__main__":
    main()
