"""Time in-place clipping of CPU gradients beside torch, declearn and the floor, and JAX's beside its libraries.

Contenders take turns in random order; the table shows medians in milliseconds, and how many times as long as
gradclip the others take. The floor is a plain read of the same bytes (not clipped), or that and a plain read and write
(clipped), by as many threads.
"""

import argparse
import itertools
import json
import random
from functools import partial
from pathlib import Path

import brainstate
import jax
import jax_privacy.clipping
import numpy as np
import optax
import torch
from declearn.model.sklearn import NumpyVector
from declearn.optimizer.modules import L2GlobalClipping
from floor import Floor
from timing import medians
from workloads import GPT2_SMALL, WORKLOADS

import gradclip
import gradclip.integrations.brainstate
import gradclip.integrations.jax_privacy
import gradclip.integrations.optax

CASES = ("not clipped", "clipped")
# Each call has a lower threshold than the one before, so that each clips; or one that never clips.
THRESHOLDS = {"not clipped": itertools.repeat(1e9), "clipped": (1e2 * 0.999**k for k in itertools.count())}


def torch_contenders(shapes, dtype, case):
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    grads = [parameter.grad for parameter in parameters]
    floor = Floor([g.data_ptr() for g in grads], [g.nbytes for g in grads], torch.get_num_threads())
    thresholds = THRESHOLDS[case]
    return {
        "floor": floor.read if case == "not clipped" else floor.read_and_rewrite,
        "gradclip.clip_grad_norm_": lambda: gradclip.clip_grad_norm_(parameters, next(thresholds)),
        "torch.nn.utils.clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, next(thresholds)),
    } | ({"gradclip.grad_norm": lambda: gradclip.grad_norm(parameters)} if case == "not clipped" else {})


def numpy_contenders(case):
    arrays = {f"{i}": np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(GPT2_SMALL)}
    floor = Floor(
        [x.ctypes.data for x in arrays.values()], [x.nbytes for x in arrays.values()], torch.get_num_threads()
    )
    vector = NumpyVector(arrays)
    thresholds = THRESHOLDS[case]
    return {
        "floor": floor.read if case == "not clipped" else floor.read_and_rewrite,
        "gradclip.clip_grad_norm_": lambda: gradclip.clip_grad_norm_(arrays, next(thresholds)),
        "declearn L2GlobalClipping": lambda: L2GlobalClipping(max_norm=next(thresholds)).run(vector),
    }


def jax_contenders(case, how):
    """One tree of gradients for all; donated calls get theirs copied anew, outside of the time taken."""
    tree = [jax.numpy.asarray(np.random.default_rng(0).standard_normal(s, np.float32)) for s in GPT2_SMALL]
    threshold = 1e9 if case == "not clipped" else 100.0
    given = [tree]

    def copied():
        given[0] = jax.block_until_ready(jax.tree.map(jax.numpy.copy, tree))

    def contender(function):
        call = function if how == "eager" else jax.jit(function, donate_argnums=(0,) if how == "donated" else ())

        def timed():
            return jax.block_until_ready(call(given[0], threshold))

        return (timed, copied) if how == "donated" else timed

    ours, theirs = gradclip.integrations, optax.clip_by_global_norm
    return {
        name: contender(function)
        for name, function in {
            "gradclip (optax name)": lambda t, c: ours.optax.clip_by_global_norm(c).update(t, optax.EmptyState())[0],
            "optax.clip_by_global_norm": lambda t, c: theirs(c).update(t, optax.EmptyState())[0],
            "jax_privacy clip_pytree": lambda t, c: jax_privacy.clipping.clip_pytree(t, clip_norm=c)[0],
            "brainstate clip_grad_norm": lambda t, c: brainstate.nn.clip_grad_norm(t, c),
        }.items()
    }


def all_contenders(quick):
    for name, shapes in itertools.islice(WORKLOADS.items(), 1 if quick else None):
        for dtype, case in itertools.product(("float32", "bfloat16", "float16"), CASES):
            yield (
                name,
                f"torch {dtype}",
                case,
                lambda s=shapes, d=dtype, c=case: torch_contenders(s, getattr(torch, d), c),
            )
    for case in CASES:
        yield "GPT-2 small", "NumPy float32", case, partial(numpy_contenders, case)
    for how, case in itertools.product(("jitted", "donated", "eager"), CASES):
        yield "GPT-2 small", f"JAX {how} float32", case, partial(jax_contenders, case, how)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="GPT-2 small only")
    parser.add_argument("--only", default="", help="what the framework and dtype must contain")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clipping.json"))
    options = parser.parse_args()
    random.seed(0)
    rows = []
    for workload, kind, case, make in all_contenders(options.quick):
        if options.only not in kind:
            continue
        measured = medians(make(), options.repeats)
        ours = next(ms for name, ms in measured.items() if name.startswith("gradclip"))
        for name, ms in measured.items():
            rows.append(
                {"workload": workload, "kind": kind, "case": case, "name": name, "ms": ms, "of ours": ms / ours}
            )
            print(f"{workload:<20} {kind:<22} {case:<12} {name:<32} {ms:9.2f} ms {ms / ours:6.2f}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"threads": torch.get_num_threads(), "repeats": options.repeats, "rows": rows}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
