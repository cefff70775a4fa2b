"""Count what XLA makes of a jitted `clip_by_global_norm` without the kernels, as on accelerators, and of optax's.

python benchmarks/counts_jax.py [--write]
"""

import os
import sys
import time

os.environ["GRADCLIP_NATIVE"] = "0"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from report import COUNTS_JAX, keep
from workloads import GPT2_SMALL

import gradclip

DTYPES = ("float32", "bfloat16", "float64")


def ours(tree, max_norm=1.0):
    """Clip with gradclip."""
    return gradclip.clip_by_global_norm(tree, max_norm)[0]


def of_optax(tree, max_norm=1.0):
    """Clip with optax."""
    return optax.clip_by_global_norm(max_norm).update(tree, optax.EmptyState())[0]


FUNCTIONS = {"gradclip": ours, "optax": of_optax}


def shaped(shapes, dtype):
    """Return abstract arrays for gradients of these shapes."""
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def length(function, tree, platforms):
    """Return the number of lines of the program for these platforms."""
    return export.export(jax.jit(function), platforms=platforms)(tree).mlir_module().count("\n")


def counts(function, tree):
    """Return accessed and temporary bytes, divided by the gradients' bytes, and the numbers of fusions and lines."""
    size = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in tree)
    start = time.perf_counter()
    compiled = jax.jit(function).lower(tree).compile()
    seconds = time.perf_counter() - start
    return {
        "bytes": compiled.cost_analysis()["bytes accessed"] / size,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes / size,
        "fusions": compiled.as_text().count(" fusion("),
        "lines, CPU": length(function, tree, ("cpu",)),
        "lines, cuda and tpu": length(function, tree, ("cuda", "tpu")),
        "seconds": seconds,
    }


def main():
    """Print a line for each dtype and function."""
    lines = []
    for dtype in DTYPES:
        with jax.enable_x64(dtype == "float64"):
            for name, function in FUNCTIONS.items():
                found = counts(function, shaped(GPT2_SMALL, dtype))
                lines.append([dtype, name, found])
                print(
                    f"{dtype:9} {name:9}", *(f"{key} {value:.4g}" for key, value in found.items()), sep="  ", flush=True
                )
    keep(COUNTS_JAX, lines, "--write" in sys.argv, jax=jax.__version__)


if __name__ == "__main__":
    main()
