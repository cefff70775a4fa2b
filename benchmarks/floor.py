"""Measure the floor, a plain read or a plain read and write, with the compiled floor.cpp."""

import ctypes
import subprocess
import tempfile
from pathlib import Path


def _compiled():
    built = Path(tempfile.mkdtemp()) / "floor.so"
    source = Path(__file__).with_name("floor.cpp")
    flags = ["-std=c++20", "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, str(source), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    library.plain_read.restype = ctypes.c_uint64
    return library


_LIBRARY = _compiled()
_BYTES_WORTH_A_THREAD = 1 << 23


class Floor:
    """Read the bytes of some arrays, given by address and size. One thread reads few bytes, because that is faster."""

    def __init__(self, addresses, sizes, threads):
        self._arguments = (
            (ctypes.c_void_p * len(addresses))(*addresses),
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_int64(len(sizes)),
            min(threads, max(1, sum(sizes) // _BYTES_WORTH_A_THREAD)),
        )

    def read(self):
        """Read every byte once."""
        return _LIBRARY.plain_read(*self._arguments)

    def read_and_rewrite(self):
        """Read every byte once, then read and write every byte once."""
        _LIBRARY.plain_read(*self._arguments)
        _LIBRARY.plain_rewrite(*self._arguments, ctypes.c_uint64(0))
