"""The frameworks that the tests run on, each with the same few verbs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import gradclip._src.backends.torch.framework as torch_backend

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True)
class Framework:
    """How a test makes arrays, calls a function on a tree and reads the result."""

    name: str
    from_numpy: Callable[[np.ndarray], Any]
    to_numpy: Callable[[Any], np.ndarray]
    dtypes: tuple[str, ...] = DTYPES
    traced: bool = False
    jit: bool = False

    @property
    def immutable(self) -> bool:
        """Whether nobody can write the arrays, so that others replace them."""
        return self.name.startswith(("jax", "tensorflow"))

    def sum(self, x: Any) -> Any:
        if not self.name.startswith("tensorflow"):
            return x.sum()
        import tensorflow as tf

        return tf.reduce_sum(x)

    def array(self, values: Any, dtype: str = "float32") -> Any:
        with self.mode():
            return self.from_numpy(np.array(values).astype(numpy_dtype(dtype)))

    def call(self, function: Callable[..., Any], tree: Any, *args: Any) -> Any:
        with self.mode():
            return jax.jit(function)(tree, *args) if self.jit else function(tree, *args)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Enter 64-bit mode, or let CPU tensors stand for those of a device, where that is meant."""
        with ExitStack() as stack:
            if self.name == "torch-device":
                stack.enter_context(mock.patch.object(torch_backend, "in_host_memory", return_value=False))
            if self.name.startswith("jax-x64"):
                stack.enter_context(jax.enable_x64(True))
            yield

    def numbers(self, tree: Any) -> Any:
        """Return the tree with NumPy arrays for leaves."""
        if isinstance(tree, dict):
            return {key: self.numbers(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.numbers(value) for value in tree]
        return None if tree is None else self.to_numpy(tree)


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _from_tensor(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _tensorflow(array: np.ndarray) -> Any:
    import tensorflow as tf  # takes seconds, so that only tests that need it wait for it

    return tf.constant(array)


NARROW = ("float16", "bfloat16", "float32", "complex64")
ALL = (
    Framework("numpy", lambda x: x, np.asarray),
    Framework("torch", _tensor, _from_tensor),
    Framework("torch-device", _tensor, _from_tensor, traced=True),
    Framework("tensorflow", _tensorflow, lambda x: np.asarray(x.numpy())),  # NumPy takes no bfloat16 scalar itself
    Framework("jax", jnp.asarray, np.asarray, NARROW),
    Framework("jax-jit", jnp.asarray, np.asarray, NARROW, traced=True, jit=True),
    Framework("jax-x64", jnp.asarray, np.asarray, ("float64", "complex128")),
    Framework("jax-x64-jit", jnp.asarray, np.asarray, ("float64", "complex128"), traced=True, jit=True),
)
WITH_FLOAT32 = tuple(framework for framework in ALL if "float32" in framework.dtypes)
WITH_FLOAT64 = tuple(framework for framework in ALL if "float64" in framework.dtypes)
PAIRS = tuple((framework, dtype) for framework in ALL for dtype in framework.dtypes)


def by_name(value: Any) -> str:
    return value.name if isinstance(value, Framework) else str(value)
