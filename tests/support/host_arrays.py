"""Arrays in host memory as the kernels' tests draw them."""

import numpy as np

from gradclip.backends.host.arrays import HostArray, narrowed
from gradclip.core.formats import BFLOAT16
from gradclip.native import kernels

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
VARIANTS = tuple(kernels.variants())
BEST = VARIANTS[-1]


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
