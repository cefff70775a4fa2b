"""How a case makes arrays of a framework, and calls a function on them: eagerly, compiled, or as on a device."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

ALL_DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128", "mixed", "integer")
NARROW = ("float32", "bfloat16", "float16", "complex64", "mixed", "integer")
WIDE = ("float64", "complex128", "mixed")


@dataclass(frozen=True)
class Engine:
    """A framework and a way of calling.

    Attributes:
        dtypes: those of its cases; "mixed" are several, "integer" is one of numbers that do not count.
        runs: of how many inputs one case consists; several where each case is compiled.
        any_machine: whether the results do not depend on the processor.

    """

    name: str
    from_numpy: Callable[[np.ndarray], Any]
    dtypes: tuple[str, ...] = ALL_DTYPES
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    mode: Callable[[], Any] = contextlib.nullcontext
    any_machine: bool = True

    @property
    def runs(self):
        return 1 if self.compiled is None else 3

    def over(self, function):
        """Return the function, compiled where this engine does that."""
        return function if self.compiled is None else self.compiled(function)


def torch_tensor(array):
    import torch

    if not array.flags.writeable:
        return torch_tensor(array.reshape(-1)[:1].copy()).reshape(()).expand(array.shape)
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def jax_array(array):
    import jax.numpy as jnp

    return jnp.array(np.array(array))


def tensorflow_tensor(array):
    import tensorflow as tf

    return tf.constant(np.array(array))


def jitted(function):
    import jax

    return jax.jit(function)


def tf_function(function):
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # it warns that each case is traced again
    return tf.function(function)


def x64():
    import jax

    return jax.enable_x64(True)


@contextlib.contextmanager
def as_on_a_device():
    """Let CPU tensors stand for those of a device, of which nobody sees the values."""
    import torch  # noqa: F401

    import gradclip

    gradclip.global_norm(torch_tensor(np.ones(1, np.float32)))  # loads what chooses
    folder = "gradclip._src.backends.torch"
    choosing = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(folder) and hasattr(module, "in_host_memory")
    ]
    assert len(choosing) == 1, "nothing chooses between the host and a device"
    with mock.patch.object(choosing[0], "in_host_memory", return_value=False):
        yield


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("numpy", lambda x: x),
        Engine("torch", torch_tensor),
        Engine("jax", jax_array, NARROW),
        Engine("jax-x64", jax_array, WIDE, mode=x64),
        Engine("tensorflow", tensorflow_tensor),
        Engine("torch-device", torch_tensor, mode=as_on_a_device, any_machine=False),
        Engine("jax-jit", jax_array, NARROW, compiled=jitted, any_machine=False),
        Engine("jax-x64-jit", jax_array, WIDE, compiled=jitted, mode=x64, any_machine=False),
        Engine("tf-function", tensorflow_tensor, compiled=tf_function, any_machine=False),
    )
}
