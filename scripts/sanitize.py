"""Build the kernels so that they watch themselves, and run tests/native with them, in this Python's environment."""

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
    """Kernels that lost their flags would pass every test below."""
    built = list(Path(sysconfig.get_path("platlib")).glob("gradclip/native/_kernels*.so"))
    if len(built) != 1 or symbol.encode() not in built[0].read_bytes():
        sys.exit(f"expected one _kernels module that uses {symbol}, found {list(map(str, built))}")


def library(name):
    """The path of a library of the compiler."""
    done = subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    if not path.is_absolute():
        sys.exit(f"{CXX} has no {name}, which `make sanitize` needs. Install GCC, or set CXX to one that has it.")
    return str(path)


def run_tests(runtime):
    environment = {
        # Python does not bring the runtime along, and without the C++ library beside it a C++ exception ends it.
        "LD_PRELOAD": f"{runtime} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much to the end of the process
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        # Python's own allocator hands out pieces of memory that nobody watches the ends of.
        "PYTHONMALLOC": "malloc",
    }
    # Without -s pytest would hold back what is reported as the process dies.
    run_native_tests(sys.executable, "-s", **environment)


if __name__ == "__main__":
    if shutil.which(CXX) is None:
        sys.exit(f"`make sanitize` needs {CXX}, which was not found. It runs on Linux with GCC.")
    for watch, name in WATCHES.items():
        print(f"== -fsanitize={watch}", flush=True)
        install(watch)
        check_watched(f"__{name}_init")
        run_tests(library(f"lib{name}.so"))
