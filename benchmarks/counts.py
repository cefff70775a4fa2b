"""Count what clipping asks of an accelerator, compared with PyTorch and Opacus: `counts.py [KIND ...] [--write]`.

`calls`: the operations that each call dispatches for the gradients of GPT-2 small. Without a GPU, the tensors are fake
tensors on the device "cuda": device checks are real, but nothing is computed, so there are counts but no times. With a
GPU, CUDA events also time the calls. Bytes are those of each operation's arguments and results. `peak` is the most
memory that the results of a call use at a time. A wait is a read of a value, which blocks the host until the device is
done.

`compiled`: the graph nodes, kernels and compile seconds in `torch.compile`. Kernels are those that inductor generates
for the CPU. On a GPU it fuses by the same rules.

`examples`: the operations of `per_example_clip`, views included. Some operations copy a tensor into a wider dtype
internally, which the dispatcher does not see. `with copies` adds what CUDA reads and writes for those copies
(`make_reduction` in PyTorch's `ReduceOpsUtils.h`). `peak` is the most memory allocated at a time besides the gradients,
counted on the CPU, where a product of two dtypes also copies. All bytes are divided by the bytes of the gradients.
"""

import argparse
import contextlib
import statistics
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from report import COUNTS, COUNTS_COMPILED, COUNTS_EXAMPLES, keep
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import GPT2_SMALL

import gradclip
from gradclip._src.backends.torch import framework
from gradclip.integrations.torch import clip_grads_with_norm_, get_total_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WAITS = ("_local_scalar_dense", "nonzero", "aten.equal.")
PEER = "torch.nn.utils.clip_grad_norm_"
SHAPES = [(64, 2000)] * 20
LONG = [(8, 1_500_000), (8, 300_000)]


class Count(TorchDispatchMode):
    """Count dispatched operations, the bytes they read and create, and how many wait.

    With `everything`, views count too, and a result that is also an argument counts twice.
    """

    def __init__(self, *, everything=False):
        super().__init__()
        self.everything = everything
        self.operations = self.bytes = self.copied = self.waits = self.alive = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        # Queries of a fake tensor and views launch nothing.
        if func.namespace == "prim" or (func.is_view and not self.everything):
            return found
        given, made = tree_leaves((args, kwargs)), tree_leaves(found)
        new = [x for x in made if isinstance(x, torch.Tensor) and not any(x is one for one in given)]
        self.operations += 1
        self.waits += any(wait in str(func) for wait in WAITS)
        self.bytes += sum(map(size, [*given, *(made if self.everything else new)]))
        if kwargs and kwargs.get("dtype") and func is torch.ops.aten.linalg_vector_norm.default:
            wide = kwargs["dtype"].itemsize
            self.copied += 2 * args[0].numel() * wide if args[0].element_size() != wide else 0
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
    parameters = with_gradients(grads)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)


def with_gradients(grads):
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return parameters


CALLS = {
    "clip_grad_norm_": in_place(),
    "clip_grad_norm_, ord=1": in_place(1),
    "clip_grad_norm_, ord=inf": in_place("inf"),
    "clip_grad_norm_, drop": in_place(nonfinite="drop"),
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
    return [count.operations, round(count.bytes / whole, 2), round(count.peak / whole, 2), count.waits]


def made(shapes, dtype, device="cpu"):
    return [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]


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


def of_calls(write):
    """Count each dtype and call, and time it if there is a GPU."""
    real = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if real else "none: fake tensors"
    print(f"device {device}, PyTorch {torch.__version__}, 148 gradients")
    print(f"{'dtype':9} {'call':39} {'operations':>10} {'bytes':>6} {'peak':>6} {'waits':>5} {'ms':>8}")
    lines = []
    for dtype in DTYPES:
        with contextlib.nullcontext() if real else FakeTensorMode():
            grads = [grad.normal_() if real else grad for grad in made(GPT2_SMALL, dtype, "cuda")]
            for call, run in calls(grads).items():
                times = [timed(run)] if real else []
                lines.append([str(dtype).removeprefix("torch."), call, *counted(run, grads), *times])
                name, _, operations, moved, peak, waits = lines[-1][:6]
                print(f"{name:9} {call:39} {operations:10} {moved:6.2f} {peak:6.2f} {waits:5} {(times or '-')[0]:>8}")
    path = COUNTS.with_stem(f"{COUNTS.stem}_{device.replace(' ', '_')}") if real else COUNTS
    keep(path, lines, write, device=device, torch=torch.__version__)


def compiled(call, shapes):
    """Return the number of graph nodes, the number of kernels, and the compile time in seconds."""
    from torch._inductor import config, metrics

    config.fx_graph_cache = False
    parameters = with_gradients([torch.randn(shape) for shape in shapes])
    nodes = []

    def backend(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return torch._inductor.compile(graph, inputs)

    torch.compiler.reset()
    metrics.reset()
    run = torch.compile(lambda: call(parameters), backend=backend, fullgraph=True)
    start = time.perf_counter()
    run()
    return {"nodes": nodes, "kernels": metrics.generated_kernel_count, "seconds": round(time.perf_counter() - start, 1)}


COMPILED = {
    "torch.nn.utils": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True),
    "gradclip": lambda params: gradclip.clip_grad_norm_(params, 1.0),
}


def of_compiled(write):
    lines = []
    for tensors in (30, 148):
        # The real shapes, but shorter. The counts do not depend on lengths.
        shapes = [tuple(max(2, n // 16) for n in shape) for shape in GPT2_SMALL[:tensors]]
        for name, call in COMPILED.items():
            lines.append([tensors, name, compiled(call, shapes)])
            print(*lines[-1], flush=True)
    keep(COUNTS_COMPILED, lines, write, torch=torch.__version__)


def ours(grads, **options):
    return lambda: gradclip.per_example_clip(grads, 1.0, **options)


def opacus(grads, per_layer=False, **_):
    """Return a call in which Opacus clips and adds the same gradients."""
    from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

    parameters = [torch.nn.Parameter(g.new_zeros(g.shape[1:])) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad_sample = grad
    kind, threshold = (DPPerLayerOptimizer, [1.0] * len(grads)) if per_layer else (DPOptimizer, 1.0)
    with unset_fake_temporarily():  # the constructor reads its thresholds
        optimizer = kind(
            torch.optim.SGD(parameters, 0.1), noise_multiplier=0.0, max_grad_norm=threshold, expected_batch_size=1
        )
    return torch.no_grad()(optimizer.clip_and_accumulate)


def counted_examples(call, grads):
    """Return the operations of a call, its bytes, and its bytes with copies."""
    whole = sum(map(size, grads))
    with as_on_a_device(), Count(everything=True) as count:
        call()
    return count.operations, count.bytes / whole, (count.bytes + count.copied) / whole


def as_on_a_device():
    """Treat CPU tensors like tensors on a device."""
    return mock.patch.object(framework, "in_host_memory", return_value=False)


def peak_of(call, grads):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with as_on_a_device(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most / sum(map(size, grads))


CASES = [
    ("float32", torch.float32, SHAPES, {}),
    ("bfloat16", torch.bfloat16, SHAPES, {}),
    ("float64", torch.float64, SHAPES, {}),
    ("float32, zero", torch.float32, SHAPES, {"nonfinite": "zero"}),
    ("float32, propagate", torch.float32, SHAPES, {"nonfinite": "propagate"}),
    ("float32, by layer", torch.float32, SHAPES, {"per_layer": True}),
    ("bfloat16, by layer", torch.bfloat16, SHAPES, {"per_layer": True}),
    ("float64, by layer", torch.float64, SHAPES, {"per_layer": True}),
    ("float32, long rows", torch.float32, LONG, {}),
]


def of_examples(write):
    print(f"20 tensors of (64, 2000); long rows: {LONG}")
    print(f"{'':32}{'operations':>11}{'bytes':>7}{'with copies':>13}{'peak':>7}   on fake CUDA tensors")
    lines = []
    for name, dtype, shapes, options in CASES:
        for who, library in (("gradclip", ours), ("Opacus", opacus)):
            grads = made(shapes, dtype)
            found = counted_examples(library(grads, **options), grads)
            grads = made(shapes, dtype)  # Opacus does not clip the same gradients twice
            most = peak_of(library(grads, **options), grads)
            with FakeTensorMode():
                fakes = made(shapes, dtype, "cuda")
                fake = counted_examples(library(fakes, **options), fakes)
            lines.append([name, who, *found, most])
            figures = "{:11}{:7.1f}{:13.1f}{:7.2f}".format(*found, most)
            print(f"{name + ', ' + who:32}{figures}   {fake[0]} operations, {fake[1]:.1f}", flush=True)
    keep(COUNTS_EXAMPLES, lines, write, torch=torch.__version__)


KINDS = {"calls": of_calls, "compiled": of_compiled, "examples": of_examples}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all if none is given")
    parser.add_argument("--write", action="store_true", help="store the figures in benchmarks/results")
    options = parser.parse_args()
    for kind in options.kinds or KINDS:
        KINDS[kind](options.write)


if __name__ == "__main__":
    main()
