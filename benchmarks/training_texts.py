"""Tasks that predict the next character of Python's help pages: transformers and a mixture of experts."""

import pydoc_data.topics
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training_task import Task, cross_entropy, momentum, rates

# Transformers that predict the next character of Python's documentation


@cache
def text():
    """Return the characters of Python's own help pages as numbers, and how many different ones there are."""
    letters = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    letters = letters.encode("ascii", "replace")
    known, numbers = np.unique(np.frombuffer(letters, np.uint8), return_inverse=True)
    return numbers.astype(np.int32), len(known)


def passages(rng, shape, length, *, unseen=False):
    """Return passages of `length` characters; the last tenth of the text is unseen in training."""
    numbers, _ = text()
    edge = len(numbers) * 9 // 10
    low, high = (edge, len(numbers)) if unseen else (0, edge)
    return numbers[rng.integers(low, high - length, shape)[..., None] + np.arange(length)]


def transformer_start(width, layers, context, seed):
    rng, (_, letters) = np.random.default_rng(seed), text()

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    block = [
        {
            "qkv": drawn(width, 3 * width),
            "out": drawn(width, width),
            "up": drawn(width, 4 * width),
            "down": drawn(4 * width, width),
            "scales": jnp.ones((2, width)),
        }
        for _ in range(layers)
    ]
    return {"letters": 0.5 * drawn(width, letters).T, "places": 0.5 * drawn(width, context).T, "blocks": block}


def normalised(x, scale):
    return scale * x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


def transformer(heads, weights, tokens):
    """Score the next character at each place: (batch, places, letters)."""
    count, width = tokens.shape[-1], weights["letters"].shape[-1]
    x = weights["letters"][tokens] + weights["places"][:count]
    hidden = jnp.tril(jnp.ones((count, count), bool))
    for block in weights["blocks"]:
        qkv = normalised(x, block["scales"][0]) @ block["qkv"]
        q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, heads, width // heads), -3, 0)
        share = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        share = jax.nn.softmax(jnp.where(hidden, share, -1e9).astype(jnp.float32)).astype(x.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", share, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normalised(x, block["scales"][1]) @ block["up"]) @ block["down"]
    return normalised(x, jnp.ones((), x.dtype)) @ weights["letters"].T


def text_loss(score, weights, batch):
    return cross_entropy(score(weights, batch[..., :-1]), batch[..., 1:])


def text_task(name, score, start, *, steps, batch, context, **settings):
    unseen = jnp.asarray(passages(np.random.default_rng(0), (64,), context + 1, unseen=True))
    loss = partial(text_loss, score)
    return Task(
        name=name,
        figure="loss",
        steps=steps,
        start=start,
        batches=lambda seed: passages(np.random.default_rng(seed), (steps, batch), context + 1),
        loss=loss,
        judge=lambda weights: loss(weights, unseen),
        **settings,
    )


def million():
    return text_task(
        "transformer, 1 M",
        partial(transformer, 4),
        partial(transformer_start, 128, 5, 32),
        steps=100,
        batch=4,
        context=32,
        rates=rates(3e-4, 3e-2),
        optimizer=optax.scale_by_adam(b2=0.95),
        together=5,
    )


def in_bfloat16(weights, tokens):
    return transformer(2, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights), tokens)


def too_fast_at_first(done):
    """Ten times the rate for the first tenth of the training."""
    return (10.0 if done < 0.1 else 1.0) * (0.5 + 0.5 * float(np.cos(np.pi * done)))


def bfloat16():
    return text_task(
        "bfloat16, rate too high at first",
        in_bfloat16,
        partial(transformer_start, 32, 2, 16),
        steps=200,
        batch=8,
        context=16,
        rates=rates(1e-4, 1e-1),
        optimizer=optax.scale_by_adam(b2=0.95),
        together=35,
        schedule=too_fast_at_first,
    )


# A mixture of experts: eight networks, of which a router chooses two for each place

EXPERTS, WINDOW = 8, 8


def experts_start(seed):
    rng, (_, letters) = np.random.default_rng(seed), text()

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    return {
        "letters": drawn(16, letters).T,
        "router": drawn(WINDOW * 16, EXPERTS),
        "up": drawn(EXPERTS, WINDOW * 16, 32),
        "down": drawn(EXPERTS, 32, 32),
        "scores": drawn(32, letters),
    }


def experts_scores(weights, tokens):
    """Score the character after each window of eight: (batch, letters)."""
    seen = weights["letters"][tokens].reshape(*tokens.shape[:-1], -1)
    chances = jax.nn.softmax(seen @ weights["router"])
    least = jnp.sort(chances, -1)[..., -2:-1]
    chosen = jnp.where(chances >= least, chances, 0.0)
    chosen = chosen / chosen.sum(-1, keepdims=True)
    inner = jax.nn.relu(jnp.einsum("bi,eio->beo", seen, weights["up"]))
    mixed = jnp.einsum("be,beo->bo", chosen, jnp.einsum("bei,eio->beo", inner, weights["down"]))
    return jax.nn.relu(mixed) @ weights["scores"]


def experts():
    loss = lambda weights, batch: cross_entropy(experts_scores(weights, batch[..., :-1]), batch[..., -1])  # noqa: E731
    unseen = jnp.asarray(passages(np.random.default_rng(0), (2000,), WINDOW + 1, unseen=True))
    return Task(
        "mixture of experts",
        "loss",
        500,
        rates(0.03, 30.0, 3),
        experts_start,
        lambda seed: passages(np.random.default_rng(seed), (500, 32), WINDOW + 1),
        loss,
        lambda weights: loss(weights, unseen),
        momentum(),
        45,
    )
