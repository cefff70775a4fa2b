"""Differences of arrays by the kernels, beside NumPy."""

import numpy as np
import pytest

from gradclip._src.native import describe_buffers, kernels


def described(*arrays):
    return describe_buffers(list(arrays)).kernels


@pytest.mark.parametrize("variant", kernels.variants())
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1003])
def test_differences_are_rounded_once(variant, dtype, size):
    rng = np.random.default_rng(size)
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    one, other = ((rng.normal(size=size) + (1j if wide is np.complex128 else 0)).astype(dtype) for _ in range(2))
    if size > 2:
        one[:2] = other[0] = np.inf
    found = np.empty(size, wide)
    kernels.use_variant(variant)
    try:
        described(one).subtract(described(other), described(found))
    finally:
        kernels.use_variant(kernels.variants()[-1])
    with np.errstate(invalid="ignore"):
        assert np.array_equal(found, one.astype(wide) - other.astype(wide), equal_nan=True)


@pytest.mark.parametrize(
    ("left", "right", "to"),
    [("f4", "f8", "f8"), ("f4", "f4", "f4"), ("f4", "c8", "f8")],
)
def test_other_dtypes_are_refused(left, right, to):
    with pytest.raises(ValueError, match="two arrays of one dtype and size"):
        described(np.ones(3, left)).subtract(described(np.ones(3, right)), described(np.ones(3, to)))


def test_other_sizes_are_refused():
    for sizes in ((3, 4, 3), (3, 3, 2)):
        with pytest.raises(ValueError, match="two arrays of one dtype and size"):
            described(np.ones(sizes[0])).subtract(described(np.ones(sizes[1])), described(np.ones(sizes[2])))
    with pytest.raises(ValueError, match="numbers of arrays differ"):
        described(np.ones(1)).subtract(described(np.ones(1), np.ones(1)), described(np.ones(1)))
