"""Build the kernels with GCC's sanitizers and run tests/native with them, in this Python's environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from environments import pip_install, run_native_tests

CXX = os.environ.get("CXX", "g++")
WATCHES = {"address,undefined": "asan", "thread": "tsan"}


def install(watch):
    settings = [f"-Ccmake.define.GRADCLIP_SANITIZE={watch}", "-Ccmake.build-type=RelWithDebInfo"]
    pip_install(sys.executable, "--force-reinstall", "--no-deps", *settings, ".", GRADCLIP_REQUIRE_NATIVE="1", CXX=CXX)


def check_watched(symbol):
    """Check that the kernels were built with the sanitizer; without it they would pass every test below."""
    built = list(Path(sysconfig.get_path("platlib")).glob("gradclip/native/_kernels*.so"))
    if len(built) != 1 or symbol.encode() not in built[0].read_bytes():
        sys.exit(f"expected one _kernels module that uses {symbol}, found {list(map(str, built))}")


def library(name):
    """Return the path of one of the compiler's libraries."""
    done = subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    if not path.is_absolute():
        sys.exit(f"{CXX} has no {name}, which `make sanitize` needs. Install GCC, or set CXX to a GCC that has it.")
    return str(path)


def run_tests(runtime):
    environment = {
        # Python does not load the sanitizer's runtime. Without the C++ library as well, a C++ exception ends Python.
        "LD_PRELOAD": f"{runtime} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees much memory only when the process ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        # The sanitizer cannot watch the bounds of blocks from Python's own allocator.
        "PYTHONMALLOC": "malloc",
    }
    # The sanitizers reserve far more addresses than a process that is short of memory may have.
    without = "--deselect=tests/native/test_parallel.py::test_a_lack_of_memory_is_an_exception_or_fewer_threads"
    # Without -s, pytest would swallow the report when the process dies.
    run_native_tests(sys.executable, "-s", without, **environment)


if __name__ == "__main__":
    if shutil.which(CXX) is None:
        sys.exit(f"`make sanitize` did not find {CXX}. It needs GCC on Linux.")
    for watch, name in WATCHES.items():
        print(f"== -fsanitize={watch}", flush=True)
        install(watch)
        check_watched(f"__{name}_init")
        run_tests(library(f"lib{name}.so"))
