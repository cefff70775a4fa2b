"""Count what clipping asks of an accelerator: operations, bytes, memory and waits, beside PyTorch's own functions.

    python benchmarks/dispatches.py [--device cuda]

Without a GPU the tensors are fake ones of the device "cuda": all checks of devices are the real ones, and nothing is
computed. Bytes are the arguments and results of each dispatched operation, as multiples of the gradients' bytes. These
are counts, not times.
"""

import argparse
import contextlib
from collections import Counter
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradclip
from gradclip.integrations.torch import clip_grads_with_norm_
from workloads import GPT2_SMALL

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default")
UNCOUNTED = ("prim.device", "aten.detach", "aten.view", "aten.unbind", "aten.alias", "prim.layout")


class Count(TorchDispatchMode):
    """Counts operations, the bytes of their arguments and results, and looks at values, each of which waits."""

    def __init__(self):
        super().__init__()
        self.operations, self.bytes, self.waits = Counter(), 0, 0
        self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("prim."):
            return found
        self.operations[name] += 1
        self.waits += any(wait in name for wait in WAITS)
        if not name.startswith(UNCOUNTED):
            given = tree_leaves((args, kwargs))
            new = [x for x in tree_leaves(found) if not any(x is one for one in given)]
            self.bytes += sum(map(size, given)) + sum(map(size, new))
            self.written += sum(map(size, new))
        return found

    @property
    def total(self):
        return sum(self.operations.values())


def size(x):
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0


def counted(function, grads):
    """Return the operations of a call, its bytes and what it allocates, as multiples of the gradients' bytes."""
    with Count() as count:
        function(grads)
    whole = sum(map(size, grads))
    return count.total, count.bytes / whole, count.written / whole, count.waits, count.operations


def holders(grads):
    return [SimpleNamespace(grad=grad) for grad in grads]


def parameters(grads):
    made = [torch.nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for one, grad in zip(made, grads, strict=True):
        one.grad = grad
    return made


OURS = {
    "clip_grad_norm_": lambda g: gradclip.clip_grad_norm_(holders(g), 1.0),
    "clip_grad_norm_, ord=1": lambda g: gradclip.clip_grad_norm_(holders(g), 1.0, 1),
    "clip_grad_norm_, ord=inf": lambda g: gradclip.clip_grad_norm_(holders(g), 1.0, "inf"),
    "clip_grad_norm_, skip": lambda g: gradclip.clip_grad_norm_(holders(g), 1.0, nonfinite="skip"),
    "clip_grad_norm_, zero": lambda g: gradclip.clip_grad_norm_(holders(g), 1.0, nonfinite="zero"),
    "clip_by_global_norm": lambda g: gradclip.clip_by_global_norm(g, 1.0),
    "clip_by_layer_norm": lambda g: gradclip.clip_by_layer_norm(g, 1.0),
    "grad_norm": lambda g: gradclip.grad_norm(holders(g)),
    "global_norm": lambda g: gradclip.global_norm(g),
    "layer_norms": lambda g: gradclip.layer_norms(g),
    "clip_grad_value_": lambda g: gradclip.clip_grad_value_(holders(g), 1.0),
    "clip_by_value": lambda g: gradclip.clip_by_value(g, 1.0),
    "clip_grads_with_norm_": lambda g: clip_grads_with_norm_(holders(g), 1.0, g[0].new_ones((), dtype=torch.float32)),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--dtype")
    parser.add_argument("--tensors", type=int)
    options = parser.parse_args()
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            if options.dtype and options.dtype not in str(dtype):
                continue
            grads = [torch.empty(shape, dtype=dtype, device="cuda") for shape in GPT2_SMALL[: options.tensors]]
            params = parameters(grads)
            calls = {"torch": lambda _, params=params: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)} | OURS
            for name, call in calls.items():
                try:
                    total, moved, allocated, waits, operations = counted(call, grads)
                    print(f"{str(dtype):16} {name:28} {total:6} {moved:6.2f} {allocated:6.2f} {waits}")
                    if options.names:
                        print("   ", dict(operations))
                except Exception as e:  # noqa
                    print(f"{str(dtype):16} {name:28} {type(e).__name__} {str(e)[:200]}")
                    if options.names: __import__("traceback").print_exc()


if __name__ == "__main__":
    main()
