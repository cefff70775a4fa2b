"""Trees of NumPy arrays, clipped where they lie."""

import subprocess
import sys

import numpy as np
import pytest

import gradclip
from frameworks import DTYPES, numpy_dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_of_arrays_is_clipped_where_it_lies(dtype):
    tree = {"w": np.array([3.0, 4.0]).astype(numpy_dtype(dtype)), "b": [np.array([12.0]).astype(numpy_dtype(dtype))]}
    leaves = [tree["w"], tree["b"][0]]
    assert float(gradclip.grad_norm(tree)) == 13.0
    assert float(gradclip.clip_grad_norm_(tree, 6.5)) == 13.0
    assert [tree["w"] is leaves[0], tree["b"][0] is leaves[1]] == [True, True]
    found = [*np.real(tree["w"]).tolist(), *np.real(tree["b"][0]).tolist()]
    assert found == pytest.approx([1.5, 2.0, 6.0], rel=2e-2 if dtype == "bfloat16" else 2e-3)


def test_one_array_is_a_tree_too():
    x = np.array([-3.0, 0.5])
    gradclip.clip_grad_value_(x, 1.0)
    assert x.tolist() == [-1.0, 0.5]
    assert float(gradclip.clip_grad_norm_(x, 10.0, nonfinite="raise")) == 1.25**0.5


def test_an_array_listed_twice_counts_and_is_scaled_once():
    x = np.array([3.0, 4.0])
    assert float(gradclip.clip_grad_norm_([x, x], 1.0)) == 5.0
    np.testing.assert_allclose(x, [0.6, 0.8], rtol=1e-14)


@pytest.mark.after_error
def test_arrays_that_cannot_be_clipped_in_place_leave_the_others_alone():
    good, locked = np.array([3.0, 4.0]), np.array([1.0])
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=r"\['b'\] is read-only, so it cannot be clipped in place. Pass a copy"):
        gradclip.clip_grad_norm_({"a": good, "b": locked}, 1.0)
    with pytest.raises(TypeError, match=r"\['b'\] has dtype object"):
        gradclip.clip_grad_norm_({"a": good, "b": np.array([1.0], object)}, 1.0)
    with pytest.raises(TypeError, match=r"must hold only NumPy arrays, got float at \['b'\]"):
        gradclip.clip_grad_norm_({"a": good, "b": 1.0}, 1.0)
    with pytest.raises(FloatingPointError, match=r"\['b'\]: 1 NaN"):
        gradclip.clip_grad_norm_({"a": good, "b": np.array([np.nan])}, 1.0, nonfinite="raise")
    assert good.tolist() == [3.0, 4.0]


def test_nothing_is_written_where_nothing_is_clipped():
    """The memory is mapped so that a write to it ends the process with an error: none comes."""
    code = (
        "import ctypes, mmap, numpy, gradclip;"
        "memory = mmap.mmap(-1, 1 << 20); x = numpy.frombuffer(memory, numpy.float32); x[:] = 1.0;"
        "libc = ctypes.CDLL(None);"
        "assert libc.mprotect(ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(1 << 20), 1) == 0;"
        "assert x.flags.writeable;"
        "print(gradclip.clip_grad_norm_({'x': x}, 512.0)); gradclip.clip_grad_value_(x, 1.0);"
        "print('written', flush=True); gradclip.clip_grad_norm_({'x': x}, 511.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["512.0", "written"]
    assert done.returncode < 0
