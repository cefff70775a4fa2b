"""Build the kernels and run tests/native: `kernels.py sanitize`, or with each named compiler: `kernels.py g++ clang++`.

`sanitize` builds with GCC's sanitizers, in this Python's environment.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from environments import new_environment, pip_install, run_native_tests

CXX = os.environ.get("CXX", "g++")
WATCHES = {"address,undefined": "asan", "thread": "tsan"}


def compile_with(compilers):
    if missing := [name for name in compilers if shutil.which(name) is None]:
        sys.exit(
            f"`make compilers` did not find {' and '.join(missing)}. Install what is missing (on Debian: apt install "
            "clang-14), or name other compilers: make compilers COMPILERS='g++ clang++'."
        )
    for compiler in compilers:
        print(f"== {compiler}", flush=True)
        c_compiler = compiler.replace("clang++", "clang").replace("g++", "gcc")
        python = new_environment(".venv-compilers", "pytest", "ml_dtypes")
        pip_install(python, "--no-cache-dir", ".", CXX=compiler, CC=c_compiler, GRADCLIP_REQUIRE_NATIVE="1")
        run_native_tests(python, "-q")


def install(watch):
    settings = [f"-Ccmake.define.GRADCLIP_SANITIZE={watch}", "-Ccmake.build-type=RelWithDebInfo"]
    pip_install(sys.executable, "--force-reinstall", "--no-deps", *settings, ".", GRADCLIP_REQUIRE_NATIVE="1", CXX=CXX)


def check_watched(symbol):
    """Check that the kernels were built with the sanitizer; without it they would pass every test below."""
    built = list(Path(sysconfig.get_path("platlib")).glob("gradclip/_src/native/_kernels*.so"))
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


def sanitize():
    if shutil.which(CXX) is None:
        sys.exit(f"`make sanitize` did not find {CXX}. It needs GCC on Linux.")
    for watch, name in WATCHES.items():
        print(f"== -fsanitize={watch}", flush=True)
        install(watch)
        check_watched(f"__{name}_init")
        run_tests(library(f"lib{name}.so"))


if __name__ == "__main__":
    sanitize() if sys.argv[1:] == ["sanitize"] else compile_with(sys.argv[1:])
