"""Test a wheel in an environment that holds only the wheel and its required dependencies.

Pass --without-kernels if the wheel was built without a compiler.
"""

import importlib.metadata
import sys

# Windows never has kernels, so their dependency is not installed.
BACKEND = set() if sys.platform == "win32" else {"nanobind-backend"}
EXPECTED = {"gradclip", "numpy", "optree", "array-api-compat", "typing-extensions", *BACKEND}


def check_environment():
    names = {d.metadata["Name"].lower().replace("_", "-") for d in importlib.metadata.distributions()}
    installed = names - {"pip", "setuptools"}
    if installed != EXPECTED:
        sys.exit(f"expected {sorted(EXPECTED)} in the environment, found {sorted(installed)}")


def check_files(kernels):
    files = [file.name for file in importlib.metadata.files("gradclip")]
    compiled = [name for name in files if name.endswith((".so", ".pyd", ".dylib"))]
    sources = [name for name in files if name.endswith((".cpp", ".hpp", ".txt")) and name != "entry_points.txt"]
    if len(compiled) != kernels or sources:
        sys.exit(f"expected {int(kernels)} compiled module and no sources, found {compiled} and {sources}")


def check_results(kernels):
    import numpy as np

    import gradclip

    status = gradclip.native_status()
    if status.available != kernels or (status.reason is None) != kernels:
        sys.exit(f"expected kernels to be {'there' if kernels else 'missing, with a reason'}, got {status!r}")
    clipped, norm = gradclip.clip_by_global_norm({"w": np.array([3.0, 4.0])}, max_norm=1.0)
    if norm != 5.0 or clipped["w"].round(6).tolist() != [0.6, 0.8]:
        sys.exit(f"expected norm 5.0 and [0.6, 0.8], got {norm} and {clipped}")
    print(f"the wheel of gradclip {gradclip.__version__} works with {', '.join(sorted(EXPECTED - {'gradclip'}))}")
    print(f"native kernels: {status}")


if __name__ == "__main__":
    kernels = "--without-kernels" not in sys.argv[1:]
    check_environment()
    check_files(kernels)
    check_results(kernels)
