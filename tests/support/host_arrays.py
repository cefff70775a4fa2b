"""Arrays in host memory as the kernels' tests draw them."""

import numpy as np

from gradclip._src.backends.host.arrays import HostArray, HostArrays, narrowed
from gradclip._src.core.formats import BFLOAT16
from gradclip._src.native import Described, describe_buffers, kernels, native_status

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
VARIANTS = tuple(kernels.variants())
IN_USE = native_status().variant


def host_array(values, dtype):
    """Numbers in a dtype; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return HostArray(narrowed(np.asarray(values, np.float64), BFLOAT16), dtype)
    with np.errstate(over="ignore"):
        return HostArray(np.asarray(values).astype(dtype), dtype)


def random_array(dtype, size, seed=0, scale=1.0):
    rng = np.random.default_rng([seed, size])
    values = rng.normal(size=size) * scale
    return host_array(values + 1j * rng.normal(size=size) * scale if "complex" in dtype else values, dtype)


def number(x):
    return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype == "bfloat16" else x.data


def known(arrays):
    """Return what describes the arrays to the kernels, which know all of them."""
    table, left_out = describe_buffers([x.data for x in arrays])
    assert list(left_out) == []
    return table


def with_kernels(arrays):
    return HostArrays(arrays, lambda x: x, describe_buffers([x.data for x in arrays]))


def without_kernels(arrays):
    return HostArrays(arrays, lambda x: x, Described(None, range(len(arrays))))
