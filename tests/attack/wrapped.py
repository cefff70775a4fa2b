"""Optimizers around optimizers, and steps that take odd arguments: clipped and watched, they do what plain steps do."""

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src.step import wrapped
from wrappers import Around, Outside

STEPS = 4
SLACK = 1e-3
"""By how much a norm may exceed the threshold before a guard speaks."""
EXACTLY = {"rtol": 1e-5, "atol": 1e-6}


class Plain(torch.optim.SGD):
    """Takes a closure, as most optimizers do."""

    def step(self, closure=None):
        self.got = ()
        return super().step(closure)


class Scaled(torch.optim.SGD):
    """Takes more behind the closure."""

    def step(self, closure=None, scale=None, *, note=None):
        self.got = (scale, note)
        return super().step(closure)


class OfLoss(torch.optim.SGD):
    """Takes a loss and a network, and no closure."""

    def step(self, loss, network=None):
        self.got = (loss, network)
        super().step()
        return loss


class Behind(torch.optim.SGD):
    """Takes the closure behind something that can be called, too."""

    def step(self, metric, closure=None):
        self.got = (metric,)
        return super().step(closure)


class Case(NamedTuple):
    """An optimizer, what is wrapped around it, how its steps are called, and whether they clip or are only watched."""

    kind: type
    around: list
    closure: bool
    by_name: bool
    clips: bool
    shapes: list
    sizes: list


def draw(rng):
    kind = (Plain, Scaled, OfLoss, Behind)[int(rng.integers(4))]
    depth = int(rng.integers(4)) if kind is Plain else 0
    # What is none of PyTorch's optimizers cannot be in one.
    around = sorted(((bool(rng.integers(2)), str(rng.choice(wrapped._INNER))) for _ in range(depth)), reverse=True)
    shapes = [(), (3,), (2, 4)][: int(rng.integers(1, 4))]
    sizes = list(10.0 ** rng.uniform(-2, 2, STEPS))
    closure = kind is not OfLoss and bool(rng.integers(2))
    return Case(kind, around, closure, bool(rng.integers(2)), bool(rng.integers(2)), shapes, sizes)


def attack(rng):
    """Take the steps of one case, and beside them what float64 makes of its gradients; compare all that can be seen."""
    case = draw(rng)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in case.shapes]
    outer = inner = case.kind(parameters, lr=1.0)
    for by_pytorch, name in case.around:
        outer = Around(outer, name) if by_pytorch else Outside(outer, name)
    clipping = clip_at_step(outer, 1.0) if case.clips else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradclip.ClippingWarning)  # its reports are asked below
        watch = gradclip.guard(outer, 1.0, every=1)
        exceeded = _steps(rng, case, outer, inner, parameters)
    kinds = {report.kind for report in watch.reports}
    assert watch.looks == STEPS, (watch.looks, case)
    assert kinds == (set() if case.clips or not exceeded else {"not_clipped"}), (kinds, case)
    if clipping is not None:
        assert clipping.steps == STEPS, case


def _steps(rng, case, outer, inner, parameters):
    """Take all steps, check each, and say whether a gradient behind the first, which is not judged, was too long."""
    exceeded = False
    for number, size in enumerate(case.sizes):
        gradients = [rng.standard_normal(p.shape) * size for p in parameters]
        before = [p.detach().double().numpy().copy() for p in parameters]
        norm = math.sqrt(sum((np.float32(x).astype(np.float64) ** 2).sum() for x in gradients))
        exceeded |= number > 0 and norm > 1.0 + SLACK
        _step(case, outer, inner, parameters, gradients)
        share = 1.0 / norm if case.clips and norm > 1.0 else 1.0
        for p, old, x in zip(parameters, before, gradients, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), old - share * x, err_msg=str(case), **EXACTLY)
    return exceeded


def _step(case, outer, inner, parameters, gradients):
    """Call one step as the case says, and check that its arguments arrive and that its result comes back."""

    def closure():
        for p, x in zip(parameters, gradients, strict=True):
            p.grad = torch.tensor(x, dtype=torch.float32)
        return 7.0

    if not case.closure:
        closure()
    given = closure if case.closure else None
    if case.kind is OfLoss:
        sent, result = (torch.ones(()), torch.nn.Identity()), None
        result = outer.step(*sent) if not case.by_name else outer.step(loss=sent[0], network=sent[1])
        assert result is sent[0], case
    elif case.kind is Behind:
        sent = (float,)
        result = outer.step(float, closure=given) if case.by_name else outer.step(float, given)
    elif case.kind is Scaled:
        sent = (0.5, "note")
        given_by = {"closure": given, "scale": 0.5} if case.by_name else {}
        result = outer.step(*() if case.by_name else (given, 0.5), note="note", **given_by)
    else:
        sent = ()
        result = outer.step(closure=given) if case.by_name else outer.step(given)
    assert len(inner.got) == len(sent), case
    assert all(one is other for one, other in zip(inner.got, sent, strict=True)), case
    assert case.kind is OfLoss or result == (7.0 if case.closure else None), case
