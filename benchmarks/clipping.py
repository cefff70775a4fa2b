"""Time clipping of the gradients of GPT-2 small (148 tensors, 124 M elements) beside the libraries it replaces.

The contenders take turns in random order. The table shows medians in milliseconds and as multiples of the floor:
a plain read (not clipped), or a plain read and a scaling in place (clipped), of the same bytes by PyTorch.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path

import jax
import numpy as np
import optax
import torch

import gradclip
from gradclip.integrations.optax import clip_by_global_norm

BLOCK = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,), *[(768,)] * 4]
GPT2_SMALL = [(50257, 768), (1024, 768), *BLOCK * 12, (768,), (768,)]
THRESHOLDS = {"not clipped": itertools.repeat(1e9), "clipped": (1e3 * 0.99**k for k in itertools.count())}


def torch_contenders(dtype, case):
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in GPT2_SMALL]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    grads = [parameter.grad for parameter in parameters]

    def floor(_):
        for grad in grads:
            grad.sum()
        if case == "clipped":
            torch._foreach_mul_(grads, 0.9999)

    return {
        "floor": floor,
        "gradclip.clip_grad_norm_": lambda c: gradclip.clip_grad_norm_(parameters, c),
        "torch.nn.utils.clip_grad_norm_": lambda c: torch.nn.utils.clip_grad_norm_(parameters, c),
    }


def jax_contenders(case):
    tree = [np.random.default_rng(0).standard_normal(shape, np.float32) for shape in GPT2_SMALL]
    grads = jax.tree.map(jax.numpy.asarray, tree)
    tensors = [torch.from_numpy(x) for x in tree]

    def floor(_):
        for tensor in tensors:
            tensor.sum()
        if case == "clipped":
            torch._foreach_mul_(tensors, 0.9999)

    def jitted(transform):
        call = jax.jit(lambda t, c: transform(c).update(t, optax.EmptyState())[0])
        return lambda c: jax.block_until_ready(call(grads, c))

    return {
        "floor": floor,
        "gradclip in jax.jit": jitted(clip_by_global_norm),
        "optax in jax.jit": jitted(optax.clip_by_global_norm),
    }


def medians(contenders, thresholds, repeats):
    """Return the median of each contender, in milliseconds, after one call that does not count."""
    times = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name in random.sample(list(contenders), len(contenders)):
            threshold = next(thresholds)
            start = time.perf_counter()
            contenders[name](threshold)
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clipping.json"))
    options = parser.parse_args()
    random.seed(0)
    rows = []
    for case, kind in itertools.product(THRESHOLDS, ("float32", "bfloat16", "float16", "jax float32")):
        contenders = jax_contenders(case) if kind.startswith("jax") else torch_contenders(getattr(torch, kind), case)
        measured = medians(contenders, THRESHOLDS[case], options.repeats)
        for name, value in measured.items():
            ratio = value / measured["floor"]
            rows.append({"case": case, "kind": kind, "name": name, "ms": round(value, 1), "floors": round(ratio, 2)})
            print(f"{kind:<12} {case:<12} {name:<32} {value:8.1f} ms {ratio:6.2f} floors", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
