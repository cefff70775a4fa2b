"""Trees of JAX arrays for the side-by-side tests, and what a peer's own rounding allows there."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from parity_support import count_of, gradients, plain_sum_ulps

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
HALF = ("float16", "bfloat16")
WIDE = ("float64", "complex128")


def mode(dtype: str) -> AbstractContextManager[Any]:
    """Return the context in which JAX has the dtype."""
    return jax.enable_x64(True) if dtype in WIDE else nullcontext()


def jax_gradients(dtype: str, *, large: bool = False) -> dict[str, jax.Array]:
    """Return the shared gradients as JAX arrays; call it within `mode`."""
    return {name: jnp.asarray(leaf) for name, leaf in gradients(DTYPES[dtype], large=large).items()}


def numbers(tree: Any) -> list[np.ndarray]:
    """Return the leaves as NumPy arrays."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def peer_ulps(dtype: str, leaves: list[Any], ord: float = 2) -> float:
    """Return how far off a clipped element of a peer may be: norm, coefficient and product are each rounded.

    XLA adds half types in float32, and other dtypes in themselves; the sums of the leaves are added in their dtype.
    """
    roundings = 3.0 + 0.25 * len(leaves)
    return roundings + (0.0 if dtype in HALF else plain_sum_ulps(count_of(leaves), ord))
