"""Test that a JAX that is too old for gradclip stays usable next to it, and that its arrays are refused."""

import sys

import numpy as np

import gradclip


def check_numpy():
    clipped, norm = gradclip.clip_by_global_norm({"w": np.array([3.0, 4.0])}, max_norm=1.0)
    if norm != 5.0 or clipped["w"].round(6).tolist() != [0.6, 0.8]:
        sys.exit(f"expected norm 5.0 and [0.6, 0.8], got {norm} and {clipped}")


def check_refused(array):
    try:
        gradclip.global_norm([array])
    except ImportError as error:
        if "gradclip needs jax" not in str(error):
            raise
    else:
        sys.exit("expected an ImportError for an array of this JAX, got none")


if __name__ == "__main__":
    check_numpy()
    import jax
    import jax.numpy as jnp

    check_numpy()
    if jax.jit(lambda x: x + 1.0)(jnp.ones(2)).tolist() != [2.0, 2.0]:
        sys.exit("JAX itself gives wrong results")
    check_refused(jnp.ones(2))
    check_numpy()
    print(f"gradclip {gradclip.__version__} leaves JAX {jax.__version__} alone")
