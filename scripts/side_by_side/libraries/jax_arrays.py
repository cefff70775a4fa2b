"""What the JAX libraries share."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from side_by_side.functions import Call
from side_by_side.verdict import Answer


@contextlib.contextmanager
def mode(leaves: Sequence[np.ndarray]) -> Iterator[None]:
    """Switch 64-bit mode on if a leaf is 64-bit."""
    with jax.enable_x64(any(x.dtype == np.float64 for x in leaves)):
        yield


def on_arrays(clip: Callable[[list[jax.Array], float], tuple[Any, Sequence[Any]]]) -> Call:
    """Return a call that takes NumPy arrays; `clip` takes JAX arrays and returns clipped arrays and norms."""

    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        with mode(leaves):
            clipped, norms = clip(list(map(jnp.asarray, leaves)), threshold)
            return Answer([np.asarray(x) for x in clipped], [np.asarray(x) for x in norms])

    return call
