"""Count the graph nodes, kernels and compile seconds of clipping in `torch.compile`, compared with PyTorch's formula.

Kernels are those that inductor generates for the CPU. On a GPU it fuses by the same rules.
"""

import argparse
import json
import time

import torch
from report import COMPILED
from torch._inductor import config, metrics
from workloads import GPT2_SMALL

import gradclip


def measure(call, shapes):
    """Return the number of graph nodes, the number of kernels, and the compile time in seconds."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    nodes = []

    def backend(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return torch._inductor.compile(graph, inputs)

    torch.compiler.reset()
    metrics.reset()
    compiled = torch.compile(lambda: call(parameters), backend=backend, fullgraph=True)
    start = time.perf_counter()
    compiled()
    return {"nodes": nodes, "kernels": metrics.generated_kernel_count, "seconds": round(time.perf_counter() - start, 1)}


CALLS = {
    "torch.nn.utils": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True),
    "gradclip": lambda params: gradclip.clip_grad_norm_(params, 1.0),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[30, 148])
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results")
    options = parser.parse_args()
    config.fx_graph_cache = False
    lines = []
    for tensors in options.tensors:
        # The real shapes, but shorter. The counts do not depend on lengths.
        shapes = [tuple(max(2, n // 16) for n in shape) for shape in GPT2_SMALL[:tensors]]
        for name, call in CALLS.items():
            lines.append([tensors, name, measure(call, shapes)])
            print(*lines[-1], flush=True)
    if options.write:
        COMPILED.write_text(json.dumps({"torch": torch.__version__, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
