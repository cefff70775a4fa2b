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
import torch._dynamo

import gradclip._src.backends.torch.framework as torch_backend
from gradclip._src.core.formats import FLOAT64

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
        return self.name.startswith(("jax", "tensorflow", "mlx"))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled where that is meant."""
        if not self.jit:
            return function
        if not self.name.startswith("mlx"):
            return jax.jit(function)
        import mlx.core as mx

        return mx.compile(function)

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
            return self.compiled(function)(tree, *args)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Enter 64-bit mode, or let arrays of the CPU stand for those of a device, where that is meant."""
        with ExitStack() as stack:
            if self.name == "torch-device":
                stack.enter_context(mock.patch.object(torch_backend, "in_host_memory", return_value=False))
            if self.name.startswith("mlx-device"):
                import gradclip._src.backends.mlx.framework as mlx_backend

                stack.enter_context(mock.patch.object(mlx_backend, "on_gpu", return_value=True))
                if "32" not in self.name:
                    stack.enter_context(mock.patch.object(mlx_backend, "wide_of", return_value=FLOAT64))
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


def to_mlx(array: np.ndarray) -> Any:
    import mlx.core as mx

    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(
        array, dtype=getattr(mx, {"bool": "bool_", "complex128": "complex64"}.get(array.dtype.name, array.dtype.name))
    )


def from_mlx(array: Any) -> np.ndarray:
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


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
    Framework("mlx", to_mlx, from_mlx, ("float64", *NARROW)),
    Framework("mlx-device", to_mlx, from_mlx, ("float64", *NARROW), traced=True),
)
MORE_OF_MLX = (
    Framework("mlx-device32", to_mlx, from_mlx, NARROW, traced=True),  # without float64, as a GPU
    Framework("mlx-jit", to_mlx, from_mlx, ("float64", *NARROW), traced=True, jit=True),  # takes minutes to compile
)
WITH_FLOAT32 = tuple(framework for framework in ALL if "float32" in framework.dtypes)
WITH_FLOAT64 = tuple(framework for framework in ALL if "float64" in framework.dtypes)
PAIRS = tuple((framework, dtype) for framework in ALL for dtype in framework.dtypes)


def by_name(value: Any) -> str:
    return value.name if isinstance(value, Framework) else str(value)
