"""Time clipping and adding 256 per-example gradients, compared with Opacus' einsum, optax and jax_privacy.

The unit `reads` is the time of a plain read of the same gradients with the same number of threads.
"""

import random

import jax
import jax_privacy.clipping
import numpy as np
import optax
import torch
from floor import Floor
from report import PER_EXAMPLE, parser, rows, show, write_measured
from timing import medians

import gradclip
import gradclip.integrations.optax

BATCH = 256
WORKLOADS = {
    "100 k in 8 tensors": [(12_500,)] * 8,
    "1 M in 8 tensors": [(125_000,)] * 8,
    "1 M in 214 tensors": [(4_672,)] * 214,
}


def norms_and_einsum(grads, max_norm):
    """Clip and add per-example gradients like Opacus' optimizer: norms of norms, then a weighted sum for each leaf."""
    norms = torch.stack([g.flatten(1).norm(2, dim=-1) for g in grads], dim=1).norm(2, dim=1)
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return [torch.einsum("i,i...", factors, g) for g in grads]


def numpy_einsum(grads, max_norm):
    norms = np.sqrt(sum(np.einsum("ij,ij->i", g, g) for g in grads))
    factors = np.minimum(1.0, max_norm / (norms + 1e-6)).astype(np.float32)
    return [np.einsum("i,ij->j", factors, g) for g in grads]


def jax_contenders(arrays):
    grads = [jax.device_put(x) for x in arrays]
    ours = jax.jit(lambda g: gradclip.integrations.optax.per_example_global_norm_clip(g, 1.0))
    theirs = jax.jit(lambda g: optax.per_example_global_norm_clip(g, 1.0))
    slow = jax.jit(jax_privacy.clipping.clipped_fun(lambda g: g, l2_clip_norm=1.0, keep_batch_dim=False))
    return {
        name: lambda f=function: jax.block_until_ready(f(grads))
        for name, function in {
            "gradclip (optax name), jitted": ours,
            "optax.per_example_global_norm_clip, jitted": theirs,
            "jax_privacy.clipping.clipped_fun, jitted": slow,
        }.items()
    }


def contenders(shapes, framework):
    arrays = [np.random.default_rng(i).standard_normal((BATCH, *shape), np.float32) for i, shape in enumerate(shapes)]
    addresses, sizes = [x.ctypes.data for x in arrays], [x.nbytes for x in arrays]
    reader = Floor(addresses, sizes, torch.get_num_threads())
    floor = {"floor": lambda kept=arrays: reader.read()}  # the floor only holds addresses
    if framework == "JAX":
        return floor | jax_contenders(arrays)
    if framework == "NumPy":
        einsum = {"numpy.einsum, twice": lambda: numpy_einsum(arrays, 1.0)}
        return floor | {"gradclip.per_example_clip": lambda: gradclip.per_example_clip(arrays, 1.0)} | einsum
    tensors = [torch.from_numpy(x) for x in arrays]
    return floor | {
        "gradclip.per_example_clip": lambda: gradclip.per_example_clip(tensors, 1.0),
        "opacus' norms and einsum": lambda: norms_and_einsum(tensors, 1.0),
    }


def main():
    options = parser(__doc__, PER_EXAMPLE, "the smallest set only").parse_args()
    random.seed(0)
    found = []
    for workload, shapes in list(WORKLOADS.items())[: 1 if options.quick else None]:
        for framework in ("PyTorch", "NumPy", "JAX"):
            measured = medians(contenders(shapes, framework), options.repeats, options.seconds)
            described = {"workload": workload, "case": framework}
            here = [{**row, "reads": row["ms"] / measured["floor"]} for row in rows(described, measured)]
            show(f"{BATCH} x {workload}", here)
            print("  in reads: " + ", ".join(f"{row['name']} {row['reads']:.2f}" for row in here), flush=True)
            found += here
    write_measured({"threads": torch.get_num_threads(), "repeats": options.repeats, "rows": found}, options)


if __name__ == "__main__":
    main()
