"""Time gradclip's calls on a GPU beside PyTorch's and the floor; gpu.py starts this, row by row."""

import gc
import itertools
import math
import random

import torch
from gpu_clock import Device, medians
from gpu_contenders import CALLS, FALLS, Gradients, contenders
from gpu_worker import Row, answer, options_of
from workloads import ON_GPU

GPT2, LARGE, LORA, SMALL, RESNET = ON_GPU
FIRST = "clip_grad_norm_"
DTYPES = ("float32", "bfloat16", "float16")
OF_LARGE = (FIRST, "clip_grad_layer_norm_", "clip_grad_norm_, four groups", "grad_norm")
OF_HALF = (FIRST, "clip_grad_layer_norm_", "clip_by_global_norm")


def rows(workload, dtype, calls=tuple(CALLS)):
    return [Row(workload, dtype, call, case) for call in calls for case in CALLS[call][2]]


def plan():
    """Return all rows, the most telling first."""
    first = [row for dtype in DTYPES[:2] for row in rows(GPT2, dtype, [FIRST])]
    large = rows(LARGE, "bfloat16", OF_LARGE)
    of_gpt2 = [row for dtype in DTYPES for row in rows(GPT2, dtype)]
    others = [
        row
        for workload, dtype in itertools.product((LORA, SMALL, RESNET), DTYPES)
        for row in rows(workload, dtype, OF_HALF if dtype == "float16" else tuple(CALLS))
    ]
    return list(dict.fromkeys(first + large + of_gpt2 + others))


def tiny(shapes):
    return [tuple(math.ceil(n / 32) for n in shape) for shape in shapes[:40]]


class Measure:
    """Time rows. Gradients are kept for the next row of the same workload and dtype."""

    def __init__(self, device, options):
        self.device, self.options = device, options
        self.kept, self.held = None, None

    def __call__(self, row):
        if self.kept != row[:2]:
            self._make(row)
        try:
            found = self._measured(row)
        except Exception:
            self._drop()
            raise
        if "errors" in found:
            self._drop()
        return found

    def _make(self, row):
        self._drop()
        shapes = ON_GPU[row.workload]
        shapes = tiny(shapes) if self.options.small else shapes
        self.held = Gradients(shapes, getattr(torch, row.dtype), self.device.name)
        self.kept = row[:2]

    def _drop(self):
        self.kept = self.held = None
        gc.collect()
        self.device.forget()

    def _measured(self, row):
        calls, how = contenders(self.held, row.call, row.case)
        turns, times, errors = medians(self.device, calls, self.options.turns)
        found = {"tensors": len(self.held.grads), "bytes": self.held.bytes, "peer": CALLS[row.call][1], "how": how}
        if how == FALLS:
            found["norm over threshold"] = self.held.share()
        return {**found, "turns": turns, "times": times, **({"errors": errors} if errors else {})}


def prepare(options):
    random.seed(0)
    torch.manual_seed(0)
    device = Device(options.device)
    return device, device.described(), Measure(device, options)


if __name__ == "__main__":
    answer(options_of(__doc__), plan(), prepare)
