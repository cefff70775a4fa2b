"""Guards whose optimizers wait, while other models come, are clipped and go: none is kept, and no mistake is missed."""

import gc
import warnings
import weakref

import torch

import gradclip
from gradclip import clip_at_step
from gradclip.integrations.torch import clip_in_backward

OTHERS = 12
KEPT = 2
"""How many of them may be alive at the end: the last, and one that a traceback or a frame holds."""


def call(rng, parameters):
    """Clip gradients in one of the ways that a guard hears of."""
    way = int(rng.integers(6))
    if way == 0:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    elif way == 1:
        torch.nn.utils.clip_grad_value_(parameters, 1.0)
    elif way == 2:
        gradclip.clip_grad_layer_norm_(parameters, 1.0)
    elif way == 3:
        gradclip.clip_grad_norm_((p for p in parameters), gradclip.AdaptiveThreshold())
    elif way == 4:
        gradclip.clip_grad_norm_([("w", p) for p in parameters], 1.0)
    else:
        gradclip.clip_grad_norm_(parameters, 1.0)


def other(rng):
    """Train a model for some steps that no guard watches; return a reference that does not keep it."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    way = int(rng.integers(3))
    if way == 0:
        clip_at_step(optimizer, 1.0)
    elif way == 1:
        clip_in_backward(model, 1.0)
    for _ in range(int(rng.integers(1, 4))):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        if way == 2:
            call(rng, list(model.parameters()))
        optimizer.step()
    return weakref.ref(model.weight)


def attack(rng):
    """Let guards wait among other models, and ask what is alive; then make one step wrong, and ask what they say."""
    own = [torch.nn.Parameter(torch.zeros(3)) for _ in range(int(rng.integers(1, 4)))]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in own]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradclip.ClippingWarning)  # the reports are asked below
        guards = [gradclip.guard(one, 1.0, every=1) for one in optimizers]
        for _ in range(int(rng.integers(3))):  # steps before they wait
            _steps(own, optimizers, clipped=True)
        made = [other(rng) for _ in range(OTHERS)]
        gc.collect()
        alive = sum(one() is not None for one in made)
        assert alive <= KEPT, alive
        _steps(own, optimizers, clipped=True)
        assert not any(guard.reports for guard in guards), [guard.reports for guard in guards]
        wrong = bool(rng.integers(2))
        _steps(own, optimizers, clipped=not wrong)
    for guard in guards:
        kinds = [report.kind for report in guard.reports]  # where another's parameters were clipped, it may say so
        assert kinds in ([["not_clipped"], ["other_parameters"]] if wrong else [[]]), guard.reports
        guard.remove()


def _steps(parameters, optimizers, *, clipped):
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        parameter.grad = torch.full((3,), 5.0)
        if clipped:
            gradclip.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
