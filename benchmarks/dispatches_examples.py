"""Count the operations, bytes and memory of `per_example_clip` on an accelerator, compared with Opacus. No times.

`python benchmarks/dispatches_examples.py [--write]` needs no accelerator. An operation is a call that passes PyTorch's
dispatcher, views included. Its bytes are those of its arguments and results. Some operations copy a tensor into a wider
dtype internally, which the dispatcher does not see. `with copies` adds what CUDA reads and writes for those copies
(`make_reduction` in PyTorch's `ReduceOpsUtils.h`). `peak` is the most memory allocated at a time besides the gradients,
counted on the CPU, where a product of two dtypes also copies. All are divided by the bytes of the gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from report import DISPATCHES_EXAMPLES, keep
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradclip
from gradclip.backends.torch import choose

SHAPES = [(64, 2000)] * 20
LONG = [(8, 1_500_000), (8, 300_000)]


class Count(TorchDispatchMode):
    """Count operations, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        self.operations += 1
        self.bytes += sum(map(size, tensors([args, kwargs, result])))
        if kwargs and kwargs.get("dtype") and func is torch.ops.aten.linalg_vector_norm.default:
            given, wide = args[0], kwargs["dtype"].itemsize
            self.copied += 2 * given.numel() * wide if given.element_size() != wide else 0
        return result


def tensors(tree: object) -> Iterator[torch.Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))


def size(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Treat CPU tensors like tensors on a device."""
    with mock.patch.object(choose, "in_host_memory", return_value=False):
        yield


def made(shapes: Any, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]


def ours(grads: list[torch.Tensor], **options: Any) -> Callable[[], Any]:
    return lambda: gradclip.per_example_clip(grads, 1.0, **options)


def opacus(grads: list[torch.Tensor], per_layer: bool = False, **_: Any) -> Callable[[], Any]:
    """Return a call in which Opacus clips and adds the same gradients."""
    parameters = [torch.nn.Parameter(g.new_zeros(g.shape[1:])) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad_sample = grad
    kind, threshold = (DPPerLayerOptimizer, [1.0] * len(grads)) if per_layer else (DPOptimizer, 1.0)
    with unset_fake_temporarily():  # the constructor reads its thresholds
        optimizer = kind(
            torch.optim.SGD(parameters, 0.1), noise_multiplier=0.0, max_grad_norm=threshold, expected_batch_size=1
        )
    return torch.no_grad()(optimizer.clip_and_accumulate)


@dataclass(frozen=True)
class Counted:
    """The counts of one call: operations, and bytes divided by the bytes of the gradients."""

    operations: int
    bytes: float
    with_copies: float


def counted(call: Callable[[], Any], grads: list[torch.Tensor]) -> Counted:
    whole = sum(map(size, grads))
    with as_on_a_device(), Count() as count:
        call()
    return Counted(count.operations, count.bytes / whole, (count.bytes + count.copied) / whole)


def peak(call: Callable[[], Any], grads: list[torch.Tensor]) -> float:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with as_on_a_device(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
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


def main() -> None:
    print(f"20 tensors of (64, 2000); long rows: {LONG}")
    print(f"{'':32}{'operations':>11}{'bytes':>7}{'with copies':>13}{'peak':>7}   on fake CUDA tensors")
    lines = []
    for name, dtype, shapes, options in CASES:
        for who, calls in (("gradclip", ours), ("Opacus", opacus)):
            grads = made(shapes, dtype)
            found = counted(calls(grads, **options), grads)
            grads = made(shapes, dtype)  # Opacus does not clip the same gradients twice
            most = peak(calls(grads, **options), grads)
            with FakeTensorMode():
                fakes = made(shapes, dtype, "cuda")
                fake = counted(calls(fakes, **options), fakes)
            lines.append([name, who, found.operations, found.bytes, found.with_copies, most])
            print(
                f"{name + ', ' + who:32}{found.operations:11}{found.bytes:7.1f}{found.with_copies:13.1f}{most:7.2f}"
                f"   {fake.operations} operations, {fake.bytes:.1f}",
                flush=True,
            )
    keep(DISPATCHES_EXAMPLES, lines, torch=torch.__version__)


if __name__ == "__main__":
    main()
