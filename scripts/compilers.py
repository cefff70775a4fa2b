"""Build the kernels with each named compiler and run tests/native: `compilers.py g++ clang++-14`."""

import shutil
import sys

from environments import new_environment, pip_install, run_native_tests


def check(compiler):
    print(f"== {compiler}", flush=True)
    c_compiler = compiler.replace("clang++", "clang").replace("g++", "gcc")
    python = new_environment(".venv-compilers", "pytest", "ml_dtypes")
    pip_install(python, "--no-cache-dir", ".", CXX=compiler, CC=c_compiler, GRADCLIP_REQUIRE_NATIVE="1")
    run_native_tests(python, "-q")


if __name__ == "__main__":
    compilers = sys.argv[1:]
    if missing := [name for name in compilers if shutil.which(name) is None]:
        sys.exit(
            f"`make compilers` did not find {' and '.join(missing)}. Install what is missing (on Debian: apt install "
            "clang-14), or name other compilers: make compilers COMPILERS='g++ clang++'."
        )
    for compiler in compilers:
        check(compiler)
