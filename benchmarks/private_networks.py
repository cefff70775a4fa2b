"""Networks for timing private training in JAX and PyTorch: parameters, the loss of a batch, and batches."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

CLASSES, TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS = 10, 64, 256, 128, 4, 2


class Network(NamedTuple):
    """`loss(params, features, labels)` returns the mean over a batch; `batch(size)` returns features and labels."""

    params: Any
    loss: Callable[..., Any]
    batch: Callable[[int], Any]


def normal(seed, *shape):
    """Return random weights that keep the magnitude of their input. All axes except the last are inputs."""
    fan_in = math.prod(shape[:-1])
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) / fan_in**0.5)


def images(size, *shape):
    rng = np.random.default_rng(0)
    return rng.standard_normal((size, *shape), np.float32), rng.integers(CLASSES, size=size, dtype=np.int32)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()


def perceptron():
    widths = [784, 512, 256, CLASSES]
    params = [(normal(i, *pair), jnp.zeros(pair[1])) for i, pair in enumerate(itertools.pairwise(widths))]

    def loss(params, features, labels):
        *hidden, (w, b) = params
        for inner_w, inner_b in hidden:
            features = jax.nn.relu(features @ inner_w + inner_b)
        return cross_entropy(features @ w + b, labels)

    return Network(params, loss, lambda size: images(size, 784))


def convolution():
    params = {
        "first": (normal(0, 5, 5, 1, 16), jnp.zeros(16)),
        "second": (normal(1, 5, 5, 16, 32), jnp.zeros(32)),
        "dense": (normal(2, 7 * 7 * 32, CLASSES), jnp.zeros(CLASSES)),
    }

    def layer(params, x):
        w, b = params
        y = jax.lax.conv_general_dilated(x, w, (2, 2), [(2, 2), (2, 2)], dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + b)

    def loss(params, features, labels):
        hidden = layer(params["second"], layer(params["first"], features))
        w, b = params["dense"]
        return cross_entropy(hidden.reshape(len(hidden), -1) @ w + b, labels)

    return Network(params, loss, lambda size: images(size, 28, 28, 1))


def attention(params, x):
    """Return causal self-attention of `x`, shape (batch, tokens, width)."""
    q, k, v = jnp.moveaxis((x @ params["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ params["out"]


def normalized(scale, x):
    return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def transformer():
    def block(seed):
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
        }
        matrices = {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        return matrices | {"scales": (jnp.ones(WIDTH), jnp.ones(WIDTH))}

    params = {
        "tokens": normal(0, VOCABULARY, WIDTH),
        "positions": normal(1, TOKENS, WIDTH),
        "blocks": [block(10 * (i + 1)) for i in range(LAYERS)],
        "head": normal(2, WIDTH, VOCABULARY),
    }

    def loss(params, tokens, following):
        x = params["tokens"][tokens] + params["positions"]
        for block in params["blocks"]:
            first, second = block["scales"]
            x = x + attention(block, normalized(first, x))
            x = x + jax.nn.gelu(normalized(second, x) @ block["up"]) @ block["down"]
        return cross_entropy(x @ params["head"], following)

    def batch(size):
        text = np.random.default_rng(0).integers(VOCABULARY, size=(size, TOKENS + 1), dtype=np.int32)
        return text[:, :-1], text[:, 1:]

    return Network(params, loss, batch)


def torch_perceptron():
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(linear(784, 512), relu(), linear(512, 256), relu(), linear(256, CLASSES)), (784,)


def torch_convolution():
    conv, relu = torch.nn.Conv2d, torch.nn.ReLU
    layers = [conv(1, 16, 5, 2, 2), relu(), conv(16, 32, 5, 2, 2), relu(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(7 * 7 * 32, CLASSES)), (1, 28, 28)
