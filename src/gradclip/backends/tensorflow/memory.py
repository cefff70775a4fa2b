"""TensorFlow tensors in host memory: NumPy views of tensors, and new tensors in memory that NumPy allocated."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor  # the type of eager tensors has no public name

from gradclip import native
from gradclip.backends.host.aligned import aligned_empty, is_aligned
from gradclip.backends.host.arrays import HostArray
from gradclip.core.formats import BFLOAT16

FLOATING = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128}
_LARGE = 1 << 16  # bytes; below this, a TensorFlow operation costs more than allocating memory
_FIRST_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def tensor_of(leaf: Any) -> Any:
    """Return a leaf as a tensor: a variable as its value, a number as float32 or complex64."""
    if isinstance(leaf, tf.Tensor):
        return leaf
    if isinstance(leaf, tf.IndexedSlices):
        raise TypeError(
            "a tf.IndexedSlices is not supported here. Pass tf.convert_to_tensor(x), or clip it as a leaf of a tree, "
            "for example with gradclip.clip_by_global_norm."
        )
    if isinstance(leaf, int | float | complex):
        return tf.constant(leaf, tf.complex64 if isinstance(leaf, complex) else tf.float32)
    return tf.convert_to_tensor(leaf)


def in_host_memory(array: Any) -> bool:
    """Say whether an array's values are in host memory."""
    device = array.device
    return device == _FIRST_CPU or "device:CPU:" in device


def all_tensors_on_cpu(leaves: Sequence[Any]) -> bool:
    """Say whether all leaves are eager tensors on the first CPU device."""
    return set(map(type, leaves)) == {EagerTensor} and all(leaf.device == _FIRST_CPU for leaf in leaves)


def described(tensors: Sequence[tf.Tensor]) -> native.Described:
    """Describe CPU tensors to the kernels."""
    return native.describe_buffers([_bits(x) if x.dtype is tf.bfloat16 else x for x in tensors])


def viewed(tensor: tf.Tensor) -> HostArray:
    """Return a view of a tensor's memory."""
    data = _bits(tensor) if tensor.dtype is tf.bfloat16 else np.asarray(tensor)
    return HostArray(data, tensor.dtype.name, origin=tensor)


def _bits(tensor: tf.Tensor) -> np.ndarray:
    # For a bfloat16 scalar, NumPy would return a number, which is a copy.
    view = np.asarray(tensor if tensor.ndim else tf.bitcast(tensor, tf.uint16)).view(np.uint16)
    view.flags.writeable = False  # like the views of other dtypes
    return view


def taken_over(data: np.ndarray, dtype: str) -> tf.Tensor:
    """Return a tensor of a new array in the named dtype (bfloat16: of its bits). It shares the memory if possible."""
    # TensorFlow kills the process if the memory is not aligned.
    if not (is_aligned(data) and data.flags.c_contiguous and data.flags.writeable):
        copy = aligned_empty(data.shape, data.dtype)
        copy[...] = data
        data = copy
    return over(data, dtype)


def over(data: np.ndarray, dtype: str) -> tf.Tensor:
    """Do the same as `taken_over`, for an array that is known to be aligned."""
    tensor = tf.experimental.dlpack.from_dlpack(data.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if dtype == BFLOAT16.name else tensor


def new_like(x: HostArray) -> HostArray:
    """Return an array for a result. Its `origin` is a tensor, or a tensor can be made from it without a copy."""
    if x.data.nbytes < _LARGE:
        return HostArray(aligned_empty(x.shape, x.data.dtype), x.dtype)
    # TensorFlow reuses its freed memory. Fresh pages from the system would take longer than everything else here.
    with tf.device(_FIRST_CPU):
        tensor = tf.raw_ops.Empty(shape=x.shape, dtype=x.dtype)
    return HostArray(np.asarray(_Writable(tensor)), x.dtype, origin=tensor)


class _Writable:
    """Writable access to the memory of a new tensor that nothing else uses yet."""

    def __init__(self, tensor: tf.Tensor) -> None:
        interface = viewed(tensor).data.__array_interface__
        self.tensor = tensor  # keeps the memory alive
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def placed(tensor: tf.Tensor, leaf: Any) -> tf.Tensor:
    """Copy a result to the device of its leaf, if that is a different device."""
    device = getattr(leaf, "device", None) or _FIRST_CPU
    if device == _FIRST_CPU:
        return tensor
    with tf.device(device):
        return tf.identity(tensor)
