"""Time in-place clipping of CPU gradients, compared with torch, declearn and the floor, and of JAX gradients.

Contenders take turns in random order. The table shows medians in milliseconds, and the times of the others as multiples
of gradclip's. The floor is a plain read of the same bytes (not clipped), or that plus a plain read and write (clipped),
with the same number of threads.
"""

import itertools
import random
from functools import partial

import torch
from in_place import CASES, numpy_contenders, parameters_of, torch_contenders
from report import CLIPPING, parser, rows, show, write_measured
from timing import medians
from workloads import GPT2_SMALL, WORKLOADS

import gradclip
from jax_trees import HOW, jax_contenders


def with_the_norm_alone(shapes, dtype, case):
    parameters = parameters_of(shapes, getattr(torch, dtype))
    norm = {"gradclip.grad_norm": lambda: gradclip.grad_norm(parameters)} if case == "not clipped" else {}
    return torch_contenders(parameters, case) | norm


def all_contenders(quick):
    for name, shapes in itertools.islice(WORKLOADS.items(), 1 if quick else None):
        for dtype, case in itertools.product(("float32", "bfloat16", "float16"), CASES):
            yield name, f"torch {dtype}", case, partial(with_the_norm_alone, shapes, dtype, case)
    for case in CASES:
        yield "GPT-2 small", "NumPy float32", case, partial(numpy_contenders, GPT2_SMALL, case)
    for how, case in itertools.product(HOW, CASES):
        yield "GPT-2 small", f"JAX {how} float32", case, partial(jax_contenders, GPT2_SMALL, how, case)


def main():
    options = parser(__doc__, CLIPPING, "GPT-2 small only")
    options.add_argument("--only", default="", help="what the framework and dtype must contain; writes like --quick")
    options = options.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    table = []
    for workload, kind, case, make in all_contenders(options.quick):
        if options.only in kind:
            described = {"workload": workload, "kind": kind, "case": case}
            found = rows(described, medians(make(), options.repeats, options.seconds))
            show(f"{workload:<20} {kind}", found)
            table += found
    results = {"threads": torch.get_num_threads(), "repeats": options.repeats, "rows": table}
    write_measured(results, options, part=options.only)


if __name__ == "__main__":
    main()
