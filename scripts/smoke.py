"""Test an installed gradclip where it is alone: `smoke.py [without-kernels | too-old-jax]`.

The environment holds only the wheel and its required dependencies. Pass `without-kernels` if the wheel was built
without a compiler. `too-old-jax` tests that a JAX that is too old for gradclip stays usable next to it, and that its
arrays are refused.
"""

import importlib.metadata
import sys

import numpy as np

import gradclip

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
    if "py.typed" not in files:
        sys.exit("expected py.typed, by which type checkers read the types of gradclip")


def check_status(kernels):
    status = gradclip.native_status()
    if status.available != kernels or (status.reason is None) != kernels:
        sys.exit(f"expected kernels to be {'there' if kernels else 'missing, with a reason'}, got {status!r}")
    print(f"native kernels: {status}")


def check_results():
    clipped, norm = gradclip.clip_by_global_norm({"w": np.array([3.0, 4.0])}, max_norm=1.0)
    if norm != 5.0 or clipped["w"].round(6).tolist() != [0.6, 0.8]:
        sys.exit(f"expected norm 5.0 and [0.6, 0.8], got {norm} and {clipped}")


def check_wheel(kernels):
    check_environment()
    check_files(kernels)
    check_status(kernels)
    check_results()
    print(f"the wheel of gradclip {gradclip.__version__} works with {', '.join(sorted(EXPECTED - {'gradclip'}))}")


def check_refused(array):
    try:
        gradclip.global_norm([array])
    except ImportError as error:
        if "gradclip needs jax" not in str(error):
            raise
    else:
        sys.exit("expected an ImportError for an array of this JAX, got none")


def check_next_to_old_jax():
    check_results()
    import jax
    import jax.numpy as jnp

    check_results()
    if jax.jit(lambda x: x + 1.0)(jnp.ones(2)).tolist() != [2.0, 2.0]:
        sys.exit("JAX itself gives wrong results")
    check_refused(jnp.ones(2))
    check_results()
    print(f"gradclip {gradclip.__version__} leaves JAX {jax.__version__} alone")


if __name__ == "__main__":
    if "too-old-jax" in sys.argv[1:]:
        check_next_to_old_jax()
    else:
        check_wheel(kernels="without-kernels" not in sys.argv[1:])
