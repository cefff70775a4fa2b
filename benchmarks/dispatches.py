"""Count the operations that clipping dispatches to an accelerator, compared with PyTorch's own function.

The gradients are those of GPT-2 small. Without a GPU, the tensors are fake tensors on the device "cuda": device checks
are real, but nothing is computed, so there are counts but no times. With a GPU, CUDA events also time the calls.

Bytes are those of each operation's arguments and results, divided by the bytes of the gradients. `peak` is the most
memory that the results of a call use at a time. A wait is a read of a value, which blocks the host until the device is
done.
"""

import argparse
import contextlib
import json
import statistics
import weakref
from collections import Counter
from types import SimpleNamespace

import torch
from report import DISPATCHES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import GPT2_SMALL

import gradclip
from gradclip.integrations.torch import clip_grads_with_norm_, get_total_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WAITS = ("_local_scalar_dense", "nonzero", "aten.equal.")
PEER = "torch.nn.utils.clip_grad_norm_"


class Count(TorchDispatchMode):
    """Count dispatched operations: their names, the bytes they read and create, and how many wait."""

    def __init__(self):
        super().__init__()
        self.operations, self.bytes, self.waits = Counter(), 0, 0
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = str(func)
        # Queries of a fake tensor and views launch nothing.
        if name.startswith("prim.") or func.is_view:
            return found
        given = tree_leaves((args, kwargs))
        new = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and not any(x is one for one in given)]
        self.operations[name] += 1
        self.waits += any(wait in name for wait in WAITS)
        self.bytes += sum(map(size, [*given, *new]))
        for x in new:
            self._counts(size(x))
            weakref.finalize(x, self._counts, -size(x))
        return found

    def _counts(self, more):
        self.alive += more
        self.peak = max(self.peak, self.alive)


def size(x):
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0


def held(grads):
    return [SimpleNamespace(grad=grad) for grad in grads]


def one_on(grads):
    return torch.ones((), device=grads[0].device)


def in_place(*arguments, **options):
    return lambda grads: gradclip.clip_grad_norm_(held(grads), 1.0, *arguments, **options)


def peer(grads):
    parameters = [torch.nn.Parameter(grad) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)


CALLS = {
    "clip_grad_norm_": in_place(),
    "clip_grad_norm_, ord=1": in_place(1),
    "clip_grad_norm_, ord=inf": in_place("inf"),
    "clip_grad_norm_, skip": in_place(nonfinite="skip"),
    "clip_grad_norm_, zero": in_place(nonfinite="zero"),
    "clip_grad_norm_, a tensor for max_norm": lambda grads: gradclip.clip_grad_norm_(held(grads), one_on(grads)),
    "clip_grads_with_norm_": lambda grads: clip_grads_with_norm_(held(grads), 1.0, one_on(grads)),
    "clip_grad_layer_norm_": lambda grads: gradclip.clip_grad_layer_norm_(held(grads), 1.0),
    "clip_grad_value_": lambda grads: gradclip.clip_grad_value_(held(grads), 1.0),
    "grad_norm": lambda grads: gradclip.grad_norm(held(grads)),
    "get_total_norm": get_total_norm,
    "global_norm": gradclip.global_norm,
    "layer_norms": gradclip.layer_norms,
    "clip_by_global_norm": lambda grads: gradclip.clip_by_global_norm(grads, 1.0),
    "clip_by_layer_norm": lambda grads: gradclip.clip_by_layer_norm(grads, 1.0),
    "clip_by_value": lambda grads: gradclip.clip_by_value(grads, 1.0),
}


def counted(call, grads):
    """Return the operations, bytes, peak memory and waits of a call."""
    with Count() as count:
        call()
    whole = sum(map(size, grads))
    return [sum(count.operations.values()), round(count.bytes / whole, 2), round(count.peak / whole, 2), count.waits]


def made(dtype, *, real):
    grads = [torch.empty(shape, dtype=dtype, device="cuda") for shape in GPT2_SMALL]
    return [grad.normal_() for grad in grads] if real else grads


def calls(grads):
    return {PEER: peer(grads)} | {name: lambda call=call: call(grads) for name, call in CALLS.items()}


def timed(call, repeats=20):
    """Return the median time of a call in milliseconds."""
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times[3:]), 4)


def measure():
    """Return a line for each dtype and call, with its counts, and its time if there is a GPU."""
    real = torch.cuda.is_available()
    lines = []
    for dtype in DTYPES:
        with contextlib.nullcontext() if real else FakeTensorMode():
            grads = made(dtype, real=real)
            for name, call in calls(grads).items():
                counts = counted(call, grads)
                lines.append([str(dtype).removeprefix("torch."), name, *counts, *([timed(call)] if real else [])])
    device = torch.cuda.get_device_name() if real else "none: fake tensors"
    return {"device": device, "torch": torch.__version__, "lines": lines}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results")
    write = parser.parse_args().write
    found = measure()
    print(f"device {found['device']}, PyTorch {found['torch']}, 148 gradients")
    print(f"{'dtype':9} {'call':39} {'operations':>10} {'bytes':>6} {'peak':>6} {'waits':>5} {'ms':>8}")
    for dtype, name, operations, moved, peak, waits, *time in found["lines"]:
        print(f"{dtype:9} {name:39} {operations:10} {moved:6.2f} {peak:6.2f} {waits:5} {time[0] if time else '-':>8}")
    if write:
        device = "" if found["device"].startswith("none") else f"_{found['device'].replace(' ', '_')}"
        DISPATCHES.with_stem(f"{DISPATCHES.stem}{device}").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
