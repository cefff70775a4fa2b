"""Memory that frameworks take over."""

import numpy as np
import pytest

from gradclip._src.backends.host.arrays import aligned_empty, is_aligned


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (17,), (3, 5, 7)])
@pytest.mark.parametrize("dtype", ["uint16", "float32", "complex128"])
def test_new_arrays_are_aligned_and_whole(shape, dtype):
    for _ in range(8):  # where memory begins is up to chance
        array = aligned_empty(shape, dtype)
        assert array.ctypes.data % 64 == 0
        assert is_aligned(array)
        assert (array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable) == (shape, dtype, True, True)
        array[...] = 1


def test_what_begins_elsewhere_is_told():
    assert not is_aligned(aligned_empty((4,), np.float32)[1:])
