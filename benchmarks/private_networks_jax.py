"""The networks of private_steps.py in JAX: parameters and the mean loss of a batch."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from private_networks import CLASSES, INPUTS, LARGE, LONG, PERCEPTRON, SHORT, UNITS, WORDS


def normal(seed, *shape):
    """Return random weights that keep the magnitude of their input. All axes except the last are inputs."""
    fan_in = math.prod(shape[:-1])
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) / fan_in**0.5)


def dense(seed, *shape):
    return normal(seed, *shape), jnp.zeros(shape[-1])


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()


def perceptron(widths=PERCEPTRON):
    def loss(params, features, labels):
        *hidden, (w, b) = params
        for inner_w, inner_b in hidden:
            features = jax.nn.relu(features @ inner_w + inner_b)
        return cross_entropy(features @ w + b, labels)

    return [dense(i, *pair) for i, pair in enumerate(itertools.pairwise(widths))], loss


def recurrent():
    params = {
        "inputs": dense(0, INPUTS, 3 * UNITS),
        "hidden": dense(1, UNITS, 3 * UNITS),
        "head": dense(2, UNITS, CLASSES),
    }

    def loss(params, features, labels):
        (w_x, b_x), (w_h, b_h), (w, b) = params["inputs"], params["hidden"], params["head"]

        def step(h, x):
            reset_x, update_x, new_x = jnp.split(x @ w_x + b_x, 3, axis=-1)
            reset_h, update_h, new_h = jnp.split(h @ w_h + b_h, 3, axis=-1)
            update = jax.nn.sigmoid(update_x + update_h)
            new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
            return (1 - update) * new + update * h, None

        start = jnp.zeros((features.shape[0], UNITS))
        return cross_entropy(jax.lax.scan(step, start, jnp.swapaxes(features, 0, 1))[0] @ w + b, labels)

    return params, loss


def convolution():
    params = {"first": dense(0, 5, 5, 1, 16), "second": dense(1, 5, 5, 16, 32), "dense": dense(2, 7 * 7 * 32, CLASSES)}

    def layer(params, x):
        w, b = params
        y = jax.lax.conv_general_dilated(x, w, (2, 2), [(2, 2), (2, 2)], dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + b)

    def loss(params, features, labels):
        hidden = layer(params["second"], layer(params["first"], features))
        w, b = params["dense"]
        return cross_entropy(hidden.reshape(len(hidden), -1) @ w + b, labels)

    return params, loss


def attention(params, x, heads):
    """Return causal self-attention of `x`, shape (batch, tokens, width)."""
    tokens, width = x.shape[1:]
    q, k, v = jnp.moveaxis((x @ params["qkv"]).reshape(*x.shape[:2], 3, heads, width // heads), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ params["out"]


def normalized(scale, x):
    return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(seed, width):
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    matrices = {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return matrices | {"scales": (jnp.ones(width), jnp.ones(width))}


def transformer(sizes=SHORT):
    params = {
        "tokens": normal(0, sizes.vocabulary, sizes.width),
        "positions": normal(1, sizes.tokens, sizes.width),
        "blocks": [block(10 * (i + 1), sizes.width) for i in range(sizes.layers)],
        "head": normal(2, sizes.width, sizes.vocabulary),
    }

    def loss(params, tokens, following):
        x = params["tokens"][tokens] + params["positions"]
        for block in params["blocks"]:
            first, second = block["scales"]
            x = x + attention(block, normalized(first, x), sizes.heads)
            x = x + jax.nn.gelu(normalized(second, x) @ block["up"]) @ block["down"]
        return cross_entropy(x @ params["head"], following)

    return params, loss


def tied(sizes=WORDS):
    params = {"embedding": normal(0, sizes.width, sizes.vocabulary).T, "dense": dense(1, sizes.width, sizes.width)}

    def loss(params, tokens, following):
        w, b = params["dense"]
        hidden = jax.nn.relu(params["embedding"][tokens] @ w + b)
        return cross_entropy(hidden @ params["embedding"].T, following)

    return params, loss


NETWORKS = {
    "perceptron": perceptron,
    "recurrent": recurrent,
    "transformer": transformer,
    "tied": tied,
    "convolution": convolution,
    "large tied": lambda: tied(LARGE),
    "long transformer": lambda: transformer(LONG),
}
