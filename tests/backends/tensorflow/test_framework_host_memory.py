"""Tensors in host memory, and new ones of memory that NumPy has made."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from frameworks import DTYPES, numpy_dtype
from gradclip._src.backends.host.arrays import HostArray, aligned_empty
from gradclip._src.backends.tensorflow.framework import described, new_like, taken_over, tensor_of, viewed

pytestmark = pytest.mark.xdist_group("tensorflow")


def address(tensor):
    return viewed(tensor).data.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 2)])
def test_a_view_shares_memory_and_cannot_be_written(dtype, shape):
    tensor = tf.constant(np.ones(shape).astype(numpy_dtype(dtype)))
    view = viewed(tensor)
    assert (view.dtype, view.shape, view.origin is tensor) == (dtype, shape, True)
    assert address(tensor) == view.data.ctypes.data or not view.size
    assert not view.data.flags.writeable
    kernels, left_out = described([tensor])
    assert (list(left_out), kernels.dtypes) == ([], [dtype])


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_new_memory_is_taken_over_and_freed(dtype):
    data = aligned_empty((5,), dtype)
    data[...] = 3
    where, held = data.ctypes.data, weakref.ref(data)
    tensor = taken_over(data, dtype)
    assert address(tensor) == where
    del data
    gc.collect(1)  # of what is young: these are
    assert held() is not None
    assert tensor.numpy().tolist() == [3] * 5
    del tensor  # nothing refers to itself, so that no collection has to find it
    assert held() is None


def test_bits_become_bfloat16():
    bits = np.array([1.5, -2.0], numpy_dtype("bfloat16")).view(np.uint16)
    assert taken_over(bits, "bfloat16").numpy().tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "data",
    [
        aligned_empty((9,), np.float32)[1:],
        np.asfortranarray(np.zeros((3, 4), np.float32)),
        np.broadcast_to(np.float32(1), (3, 2)),
        np.zeros((4, 4), np.float32)[::2],
    ],
)
def test_what_tensorflow_cannot_take_over_is_copied(data):
    given = np.array(data)
    given[...] = 7
    if data.flags.writeable:
        data[...] = 7
    tensor = taken_over(data, "float32")
    assert address(tensor) != data.ctypes.data
    assert tf.reduce_sum(tensor * 2.0).numpy() == 2 * float(data.sum())


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_results_can_be_written_until_they_are_tensors(size, dtype):
    like = viewed(tf.ones(size, dtype))
    made = new_like(HostArray(like.data, dtype))
    made.data[...] = like.data
    tensor = taken_over(made.data, dtype) if made.origin is None else made.origin
    assert (size > 3) == (made.origin is not None)
    assert tensor.dtype.name == dtype
    assert tf.reduce_all(tensor == tf.ones(size, dtype))


def test_what_becomes_a_tensor():
    assert (tensor_of(2.0).dtype, tensor_of(3).dtype, tensor_of(1j).dtype) == (tf.float32, tf.float32, tf.complex64)
    assert tensor_of(tf.Variable([1.0])).numpy().tolist() == [1.0]
    with pytest.raises(TypeError, match=r"IndexedSlices is not supported here\. Pass tf\.convert_to_tensor\(x\), or"):
        tensor_of(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0])))
