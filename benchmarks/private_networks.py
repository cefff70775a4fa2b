"""What private_steps.py measures: contenders, and networks with the same sizes and batches in every framework."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

PLAIN = "not private"
OURS = {f"gradclip, {method}": method for method in ("auto", "ghost", "materialize")}
NOISED = "gradclip, auto and noise"
"""The whole private step: the clipped sum, and exact noise."""
CONTENDERS = {
    "JAX": (PLAIN, *OURS, NOISED, "jax.vmap and optax", "jax_privacy"),
    "PyTorch": (PLAIN, *OURS, NOISED, "Opacus hooks", "Opacus ghost"),
}
CLASSES = 10
PERCEPTRON = (784, 1000, 1000, CLASSES)
STEPS, INPUTS, UNITS = 32, 64, 128


class Transformer(NamedTuple):
    """The sizes of a transformer: `tokens` is the length of a text."""

    layers: int
    width: int
    tokens: int
    heads: int = 4
    vocabulary: int = 256


class Tied(NamedTuple):
    """The sizes of an embedding that is also the output layer, with a dense layer between."""

    vocabulary: int
    width: int
    tokens: int


SHORT, LONG = Transformer(2, 128, 64), Transformer(4, 256, 512)
WORDS, LARGE = Tied(10_000, 128, 32), Tied(256_000, 64, 1024)


class Workload(NamedTuple):
    """A network and its batch. A `large` one needs most of the memory of a machine of 24 GB."""

    title: str
    batch: int
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]
    large: bool = False


def perceptron(width):
    """Return the sizes of the layers of a perceptron with hidden layers of a width."""
    return PERCEPTRON[0], width, width, PERCEPTRON[-1]


def images(size, *shape):
    rng = np.random.default_rng(0)
    return rng.standard_normal((size, *shape), np.float32), rng.integers(CLASSES, size=size)


def texts(sizes):
    def batch(size):
        text = np.random.default_rng(0).integers(sizes.vocabulary, size=(size, sizes.tokens + 1))
        return text[:, :-1].copy(), text[:, 1:].copy()

    return batch


WORKLOADS = {
    "perceptron": Workload("perceptron 784-1000-1000-10", 256, lambda size: images(size, 784)),
    "recurrent": Workload("GRU cell, 128 units, 32 steps", 64, lambda size: images(size, STEPS, INPUTS)),
    "transformer": Workload("transformer, 2 layers of 128, 64 tokens", 32, texts(SHORT)),
    "tied": Workload("tied embedding 10,000 x 128, 32 tokens", 32, texts(WORDS)),
    "convolution": Workload("convolutional network", 128, lambda size: images(size, 28, 28, 1)),
    "large tied": Workload("tied embedding 256,000 x 64, 1,024 tokens", 4, texts(LARGE), large=True),
    "long transformer": Workload("transformer, 4 layers of 256, 512 tokens", 8, texts(LONG)),
}


def taken(size):
    """Return a mask of the places of a batch that hold examples. As in Poisson sampling, some places are empty."""
    return np.random.default_rng(0).permutation(size) < size - round(size / 10)
