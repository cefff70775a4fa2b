"""Steps of fused optimizers that clip: gradients in any layout, scales, copies and errors, beside clip and step."""

import copy
import math
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import gradclip
from gradclip import clip_at_step

MAKE = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
SHAPES = ((), (1,), (5,), (4, 6), (2, 3, 4))
LAYOUTS = ("dense", "expanded", "transposed", "strided", "inside")
STEPS = 4


class Case(NamedTuple):
    """An optimizer, how it comes, and what happens at each step."""

    optimizer: str
    copied: bool
    scaler: str
    nonfinite: str
    max_norm: float
    shapes: list
    steps: list


class Step(NamedTuple):
    """The gradients of one step as numbers and layouts, and what goes wrong in it."""

    gradients: list
    layouts: list
    fails: bool


def draw(rng):
    shapes = [SHAPES[int(rng.integers(len(SHAPES)))] for _ in range(int(rng.integers(1, 4)))]
    scaler = str(rng.choice(["none", "none", "scale", "unscale"]))
    nonfinite = str(rng.choice(["propagate", "skip", "raise"]))
    steps = [_step(rng, shapes, scaler) for _ in range(STEPS)]
    max_norm = float(rng.choice([0.0, 0.1, 1.0, 3.0, 100.0, math.inf]))
    return Case(str(rng.choice(list(MAKE))), bool(rng.integers(2)), scaler, nonfinite, max_norm, shapes, steps)


def _step(rng, shapes, scaler):
    size = 10.0 ** rng.uniform(-3, 3)
    gradients = [(rng.standard_normal(shape) * size).astype(np.float32) for shape in shapes]
    if scaler != "none" and rng.integers(4) == 0:
        gradients[0] = np.full_like(gradients[0], np.inf)
    # GradScaler refuses expanded gradients.
    layouts = [str(rng.choice([one for one in LAYOUTS if scaler == "none" or one != "expanded"])) for _ in shapes]
    return Step(gradients, layouts, bool(rng.integers(4) == 0))


def laid_out(numbers, layout):
    """Return a tensor with these numbers (an expanded one repeats the first), and the memory that it lies in."""
    plain = torch.tensor(numbers)
    if layout == "expanded":
        memory = plain.reshape(-1)[:1].clone()
        return memory.reshape(()).expand(plain.shape), memory
    if layout == "transposed":
        backward = tuple(reversed(range(plain.ndim)))
        memory = plain.permute(backward).contiguous()
        return memory.permute(backward), memory
    if layout == "strided" and plain.ndim:
        memory = torch.ones(*plain.shape[:-1], 2 * plain.shape[-1])
        memory[..., ::2] = plain
        return memory[..., ::2], memory
    memory = torch.ones(plain.numel() + 2)
    memory[1:-1] = plain.reshape(-1)
    return memory[1:-1].view(plain.shape), memory


def attack(rng):
    """Take the steps of one case folded and, beside them, by clipping before plain steps; compare."""
    case = draw(rng)
    ours, theirs = (_optimizer(case) for _ in range(2))
    clip_at_step(ours, case.max_norm, nonfinite=case.nonfinite, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=case.scaler != "none")
    scaler.scale(torch.zeros(()))
    for step in case.steps:
        _one_step(case, step, ours, theirs, scaler)


def _one_step(case: Case, step: Step, ours: Any, theirs: Any, scaler: Any) -> None:
    (mine, other) = (optimizer.param_groups[0]["params"] for optimizer in (ours, theirs))
    scale = float(scaler.get_scale())
    held = [laid_out(x * np.float32(scale), layout) for x, layout in zip(step.gradients, step.layouts, strict=True)]
    around = [(memory, tensor, memory.clone()) for tensor, memory in held]
    for p, q, (tensor, _) in zip(mine, other, held, strict=True):
        p.grad, q.grad = tensor, (tensor / scale).contiguous().clone()
    if case.scaler == "unscale":
        scaler.unscale_(ours)
        around = []
    if step.fails:
        _fails(case, scaler, ours)
        scaler.update()
        return
    scaler.step(ours)
    scaler.update()
    if all(bool(torch.isfinite(q.grad).all()) for q in other):
        gradclip.clip_grad_norm_(other, case.max_norm)
        theirs.step()
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda told: f"{told} in {case}")
    for memory, tensor, before in around:
        if not tensor.is_contiguous():
            assert torch.equal(memory, before), case
    assert {"grad_scale", "found_inf"}.isdisjoint(vars(ours)), case


def _fails(case: Case, scaler: Any, ours: Any) -> None:
    before = [p.detach().clone() for p in ours.param_groups[0]["params"]]
    with mock.patch("gradclip._src.step.within.divisor", side_effect=KeyError):
        try:
            scaler.step(ours)
        except KeyError:
            pass
        else:
            raise AssertionError(f"no error in {case}")
    assert all(map(torch.equal, before, ours.param_groups[0]["params"])), case
    assert {"grad_scale", "found_inf"}.isdisjoint(vars(ours)), case


def _optimizer(case: Case) -> Any:
    made = MAKE[case.optimizer]([torch.nn.Parameter(torch.ones(shape)) for shape in case.shapes])
    return copy.deepcopy(made) if case.copied else made
