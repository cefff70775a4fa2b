"""Sums that the kernels compute while they read a file, beside those of the same numbers in memory."""

import errno
import os
import zlib

import numpy as np
import pytest

from fresh_process import run
from gradclip._src.native import describe_buffers, kernels

CHUNK, MEMORY = 65_536, 5 << 20
SIZES = [0, 1, 17, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 1, 40 * CHUNK + 5]
BEFORE = 13  # bytes before the numbers


@pytest.fixture
def memory():
    return np.empty(3 * MEMORY, np.uint8)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes numbers to a file, and opens it."""
    opened = []

    def write(numbers):
        path = tmp_path / str(len(opened))
        path.write_bytes(b"x" * BEFORE + numbers.tobytes())
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    yield write
    for one in opened:
        os.close(one)


def drawn(dtype, size, seed=0):
    """Return random numbers, bfloat16 as the 16-bit integers that the kernels take them for."""
    x = np.random.default_rng([size, seed]).standard_normal(size)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype)


def in_memory(numbers, p, halves, piece):
    pieces = [numbers[start : start + piece] for start in range(0, numbers.size, piece)]
    return [describe_buffers([x]).kernels.sum(p, 1.0, halves, 1)[0] for x in pieces]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_sums_are_those_of_the_same_numbers_in_memory(written, memory, dtype, p):
    for size in SIZES:
        x = drawn(dtype, size)
        file = written(x)
        for piece in (CHUNK, 8 * CHUNK):
            for halves, threads in ((False, 1), (True, 3)):
                found = kernels.file_sums((file, BEFORE), size, dtype, p, halves, piece, memory, True, threads)
                assert found == (in_memory(x, p, halves, piece), zlib.crc32(x.tobytes()), 0, False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_sums_of_differences_are_those_of_differences_in_memory(written, memory, dtype):
    for size in SIZES:
        x, y = drawn(dtype, size), drawn(dtype, size, seed=1)
        places = (written(x), BEFORE), (written(y), BEFORE)
        wide = np.empty(size)
        describe_buffers([x]).kernels.subtract(describe_buffers([y]).kernels, describe_buffers([wide]).kernels)
        for threads in (1, 2):
            found = kernels.difference_sums(*places, size, dtype, 2.0, 8 * CHUNK, memory, threads)
            assert found == (in_memory(wide, 2.0, False, 8 * CHUNK), 0, 0, False)


def test_sums_are_complete_when_no_thread_can_be_started(written, memory, tmp_path):
    for number in (1, 0):
        written(np.full(40 * CHUNK, number, np.float32))
    code = """
        import ctypes, os, sys
        import numpy as np
        from gradclip._src.native import kernels

        libc, settings = ctypes.CDLL(None), ctypes.create_string_buffer(256)
        libc.pthread_attr_init(settings)
        libc.pthread_attr_setstacksize(settings, ctypes.c_size_t(2**50))  # more than there are addresses
        assert libc.pthread_setattr_default_np(settings) == 0
        ones, zeros = ((os.open(f"{sys.argv[1]}/{name}", os.O_RDONLY), 13) for name in "01")
        memory = np.empty(15 << 20, np.uint8)
        print(kernels.file_sums(ones, 40 * 65_536, "float32", 2.0, False, 65_536, memory, False, 3)[0])
        print(kernels.difference_sums(ones, zeros, 40 * 65_536, "float32", 2.0, 65_536, memory, 3)[0])
        """
    found = run(code, tmp_path, OPENBLAS_NUM_THREADS="1").splitlines()
    assert found == [str([float(CHUNK)] * 40)] * 2


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1001, (2 << 20) + 7])
def test_bytes_are_counted(written, memory, size):
    x = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    found = kernels.byte_counts((written(x), BEFORE), size, memory, True)
    assert found == (np.bincount(x, minlength=256).tolist(), zlib.crc32(x.tobytes()), 0, False)


def test_what_is_not_finite_makes_its_sum_so(written, memory):
    x = np.ones(2 * CHUNK, np.float32)
    x[0], x[-1] = np.nan, np.inf
    sums = kernels.file_sums((written(x), BEFORE), x.size, "float32", 2.0, False, CHUNK, memory, False, 1)[0]
    assert np.isnan(sums[0])
    assert sums[1] == np.inf


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_ends_too_early_or_cannot_be_read(written, memory, threads):
    x = np.ones(40 * CHUNK, np.float32)
    file, size = written(x), x.size + 1
    more = "float32", 2.0, False, 8 * CHUNK, memory, False, threads
    assert kernels.file_sums((file, BEFORE), size, *more)[2:] == (0, True)
    assert kernels.byte_counts((file, BEFORE), 4 * size, memory, False)[2:] == (0, True)
    places = (file, BEFORE), (file, BEFORE + 4)
    assert kernels.difference_sums(*places, x.size, "float32", 2.0, 8 * CHUNK, memory, threads)[2:] == (0, True)
    assert kernels.file_sums((-1, 0), size, *more)[2:] == (errno.EBADF, False)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dtype": "complex64"}, "real numbers are read"),
        ({"dtype": "int8"}, "no dtype is named int8"),
        ({"piece": 100}, "pieces of whole chunks"),
        ({"memory": bytearray(1 << 20)}, "too small"),
    ],
)
def test_what_cannot_be_read_is_refused(written, memory, wrong, words):
    x = np.ones(3, np.float32)
    asked = {"from_": (written(x), BEFORE), "count": 3, "dtype": "float32", "p": 2.0, "in_float": False}
    asked |= {"piece": CHUNK, "memory": memory, "checks": False, "threads": 1}
    with pytest.raises(ValueError, match=words):
        kernels.file_sums(**{**asked, **wrong})
    with pytest.raises(BufferError):
        kernels.file_sums(**{**asked, "memory": b"constant"})
