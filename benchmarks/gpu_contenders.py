"""What is timed on a GPU: gradclip's calls with its kernels for GPUs and without, other libraries', and the floor.

The norm of each tensor is about 1,000, so that one threshold clips every layer. A clipped call sees gradients that the
call before it has clipped: the threshold falls by 3% before each call, which is more than the rounding of half types,
and after some ninety calls gradients and threshold are multiplied by 16. None of that is timed. Calls that return new
gradients clip the same ones to half their norm.

The floor is a plain read of as many bytes, as float32 numbers, and if the call clips, a plain read and write after it.
"""

import os
from functools import partial

import torch
from gpu_results import FLOOR, KERNELS, PEER, PLAIN
from torch.nn.utils import clip_grad_norm_, get_total_norm

import gradclip

NORM = 1000.0
NEVER = 1e30
FALL, GROWTH = 0.97, 16.0
GROUPS = 4
FALLS = "the threshold falls by 3% before each call"
HALF = "new gradients, of half the norm"
FOLLOWS = "the threshold follows the norms"


def kernels_on(flag):
    """Switch gradclip's kernels for GPUs on or off, for the calls that follow."""
    os.environ["GRADCLIP_GPU_KERNELS"] = "1" if flag else "0"


class Gradients:
    """Parameters with gradients, and the thresholds of one call."""

    def __init__(self, shapes, dtype, device):
        self.parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in shapes]
        for parameter in self.parameters:
            grad = torch.randn(parameter.shape, dtype=dtype, device=device)
            parameter.grad = grad.mul_(NORM / grad.numel() ** 0.5)
        self.grads = [parameter.grad for parameter in self.parameters]
        self.bytes = sum(grad.nbytes for grad in self.grads)
        self.read = torch.randn(self.bytes // 4, device=device)
        size = -(-len(shapes) // GROUPS)
        parts = [self.parameters[start : start + size] for start in range(0, len(shapes), size)]
        self.groups = [{"params": part, "max_norm": NEVER} for part in parts]
        self.tensor = torch.tensor(NEVER, device=device)
        self.falls = False

    def start(self, case):
        """Take thresholds that no norm reaches, or those below the norms as they are."""
        self.falls = case == "clipped"
        least = float(self._norms().min())
        if not least > 0:
            raise ValueError("a gradient is zero or NaN, so calls would not clip")
        self._set(least if self.falls else NEVER)

    def fall(self):
        if self.falls:
            if self.each < NORM / 2 / GROWTH:
                torch._foreach_mul_(self.grads, GROWTH)
                self.each *= GROWTH
            self._set(FALL * self.each)

    def _set(self, each):
        self.each = each
        self.max_norm = each * len(self.grads) ** 0.5
        for group in self.groups:
            group["max_norm"] = each * len(group["params"]) ** 0.5
        self.tensor.fill_(self.max_norm)

    def share(self):
        """Return the norm of all gradients over the threshold: about 1 if the last call has clipped."""
        return float(self._norms().norm() / self.max_norm)

    def _norms(self):
        return torch.stack(torch._foreach_norm(self.grads, dtype=torch.float32))


def torchs(held):
    return lambda: clip_grad_norm_(held.parameters, held.max_norm, foreach=True)


def in_place(held, peer=torchs, **options):
    return lambda: gradclip.clip_grad_norm_(held.parameters, held.max_norm, **options), peer(held)


def zeros_first(held):
    def call():
        for grad in held.grads:
            torch.nan_to_num_(grad, 0.0, 0.0, 0.0)
        return clip_grad_norm_(held.parameters, held.max_norm, foreach=True)

    return call


def by_layer(held):
    def theirs():
        for parameter in held.parameters:
            clip_grad_norm_(parameter, held.each, foreach=True)

    return lambda: gradclip.clip_grad_layer_norm_(held.parameters, held.each), theirs


def by_group(held):
    def theirs():
        for group in held.groups:
            clip_grad_norm_(group["params"], group["max_norm"], foreach=True)

    return lambda: gradclip.clip_grad_norm_(held.groups, NEVER), theirs


def by_a_tensor(held):
    ours = partial(gradclip.clip_grad_norm_, held.parameters, held.tensor)
    return ours, lambda: clip_grad_norm_(held.parameters, held.tensor, foreach=True)


def adaptive(held):
    max_norm, monitor = gradclip.AdaptiveThreshold(), gradclip.Monitor()
    return lambda: gradclip.clip_grad_norm_(held.parameters, max_norm, monitor=monitor), torchs(held)


def norm(held):
    return lambda: gradclip.grad_norm(held.parameters), lambda: get_total_norm(held.grads, foreach=True)


def functional(held):
    max_norm = NEVER
    if held.falls:
        held.falls, max_norm = False, held.max_norm / 2

    def theirs():
        coefficient = torch.clamp(max_norm / (get_total_norm(held.grads, foreach=True) + 1e-6), max=1.0)
        return torch._foreach_mul(held.grads, coefficient)

    return lambda: gradclip.clip_by_global_norm(held.grads, max_norm), theirs


BOTH, ONE = ("not clipped", "clipped"), ("",)
TORCHS = "torch.nn.utils.clip_grad_norm_"
CALLS = {
    "clip_grad_norm_": (in_place, TORCHS, BOTH),
    "clip_grad_layer_norm_": (by_layer, f"{TORCHS} of each parameter", BOTH),
    "clip_grad_norm_, four groups": (by_group, f"{TORCHS} of each group", BOTH),
    "clip_grad_norm_, drop": (partial(in_place, nonfinite="drop"), f"{TORCHS}, which drops nothing", BOTH),
    "clip_grad_norm_, zero": (
        partial(in_place, peer=zeros_first, nonfinite="zero"),
        f"torch.nan_to_num_ of each gradient, {TORCHS}",
        BOTH,
    ),
    "clip_grad_norm_, a tensor for max_norm": (by_a_tensor, TORCHS, BOTH),
    "grad_norm": (norm, "torch.nn.utils.get_total_norm", ("not clipped",)),
    "clip_grad_norm_, AdaptiveThreshold and Monitor": (adaptive, f"{TORCHS}, a number", ("not clipped",)),
    "clip_by_global_norm": (functional, "torch.nn.utils.get_total_norm, torch._foreach_mul", BOTH),
}
"""What makes gradclip's call and the peer's, what the peer is, and the cases."""


def contenders(held, call, case):
    """Return functions, each with one that prepares it, and how the call clips."""
    held.start(case)
    make, _, _ = CALLS[call]
    ours, theirs = make(held)
    how = FOLLOWS if make is adaptive else "" if case != "clipped" else FALLS if held.falls else HALF
    clips = case == "clipped"
    return with_floor(ours, theirs, partial(_floor, held.read, clips), held.fall), how


def _floor(buffer, clips):
    buffer.sum()
    if clips:
        buffer.mul_(1.0)


def with_floor(ours, theirs, floor, prepare=lambda: None):
    """Return the contenders: ours with kernels and without, the peer, and the floor."""

    def switched(flag):
        kernels_on(flag)
        prepare()

    return {
        KERNELS: (ours, partial(switched, True)),
        PLAIN: (ours, partial(switched, False)),
        PEER: (theirs, prepare),
        FLOOR: (floor, lambda: None),
    }
