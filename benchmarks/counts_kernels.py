"""Count what the kernels for GPUs launch, read and write, beside PyTorch; needs no GPU: `counts_kernels.py [--write]`.

Triton's interpreter runs the kernels on CPU tensors with the shapes of GPT-2 small, each an eighth as long. Bytes are
those of the gradients that the kernels load and store, over the bytes of the gradients. For PyTorch they are those of
the tensors that each dispatched operation reads, and of those that its schema says it writes; an operation may launch
several kernels.

The host's time is that of a call whose kernels launch nothing, for gradients of 16 elements, on one thread. PyTorch's
is that of its own call on the same tensors.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path

# Read when Triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["GRADCLIP_GPU_KERNELS"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from counts import with_gradients
from report import COUNTS_KERNELS, keep
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import GPT2_SMALL

import gradclip
from gradclip._src.backends.torch import framework, launches
from interpreted import interpreted

SHAPES = [(-(-shape[0] // 8), *shape[1:]) for shape in GPT2_SMALL]
NEVER, ALWAYS = 1e9, 1e-3
TURNS = 60


def groups(params, max_norm):
    return [{"params": params[first::4], "max_norm": max_norm} for first in range(4)]


def watched():
    max_norm, monitor = gradclip.AdaptiveThreshold(), gradclip.Monitor()
    return lambda params, _: gradclip.clip_grad_norm_(params, max_norm, monitor=monitor)


def torchs(params, max_norm):
    return torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=True)


def torchs_groups(params, max_norm):
    for group in groups(params, max_norm):
        torchs(group["params"], max_norm)


def torchs_layers(params, max_norm):
    for one in params:
        torchs([one], max_norm)


CALLS = {
    "clip_grad_norm_": (gradclip.clip_grad_norm_, torchs),
    "clip_grad_norm_, drop": (partial(gradclip.clip_grad_norm_, nonfinite="drop"), torchs),
    "clip_grad_norm_, zero": (partial(gradclip.clip_grad_norm_, nonfinite="zero"), torchs),
    "clip_grad_norm_, four groups": (lambda p, c: gradclip.clip_grad_norm_(groups(p, c), c), torchs_groups),
    "clip_grad_layer_norm_": (gradclip.clip_grad_layer_norm_, torchs_layers),
    "clip_grad_norm_, AdaptiveThreshold and Monitor": (watched(), torchs),
}
"""gradclip's call and PyTorch's, by name."""


class Bytes(TorchDispatchMode):
    """Count the dispatched operations, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.operations = self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim" or func.is_view:
            return result
        self.operations += 1
        written = [
            given
            for given, said in zip(args, func._schema.arguments, strict=False)
            if said.alias_info is not None and said.alias_info.is_write
        ]
        self.read += size_of(args)
        self.written += size_of(written) if written else size_of(result)
        return result


def size_of(tree):
    return sum(x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, torch.Tensor))


def made(shapes):
    return with_gradients([torch.randn(shape) for shape in shapes])


def counted(call, max_norm, shapes=SHAPES):
    """Return the launches of a call, and the bytes that its kernels read and write, over those of the gradients."""
    params = made(shapes)
    whole = sum(size_of(one.grad) for one in params)
    with interpreted() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter computes with NumPy
        call(params, max_norm)
    return len(found.names), round((found.read + found.written) / whole, 2)


def counted_peer(call, max_norm, shapes=SHAPES):
    """Return the same of PyTorch's call, with operations for launches."""
    params = made(shapes)
    whole = sum(size_of(one.grad) for one in params)
    with torch.no_grad(), Bytes() as found:
        call(params, max_norm)
    return found.operations, round((found.read + found.written) / whole, 2)


def host_times(calls):
    """Return the medians of the host's microseconds of calls that take turns."""
    taken = [[] for _ in calls]
    for _ in range(TURNS):
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [1e6 * statistics.median(times[5:]) for times in taken]


def without_kernels():
    """Let kernels launch nothing, and CPU tensors take the path of a GPU's."""
    framework.in_host_memory = lambda tensors: False
    launches.launch = lambda *arguments: None


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="store the figures in benchmarks/results")
    write = options.parse_args().write
    torch.set_num_threads(1)
    lines = []
    for name, (call, peer) in CALLS.items():
        cases = [NEVER] if "AdaptiveThreshold" in name else [NEVER, ALWAYS]
        ours, theirs = ([count(one, case) for case in cases] for count, one in ((counted, call), (counted_peer, peer)))
        lines.append([name, ours, theirs])
    without_kernels()
    params = made([(4, 4)] * len(SHAPES))
    for line, (call, peer) in zip(lines, CALLS.values(), strict=True):
        line.append(host_times([partial(call, params, NEVER), partial(peer, params, NEVER)]))
        print(*line, flush=True)
    keep(COUNTS_KERNELS, lines, write, torch=torch.__version__, tensors=len(SHAPES))


if __name__ == "__main__":
    main()
