"""Steps with arguments of their own: what watches or clips passes all of them on as they are."""

import pytest
import torch

import gradclip
from gradclip import clip_at_step

WATCHES = {"guard": gradclip.guard, "clip_at_step": lambda optimizer: clip_at_step(optimizer, 1.0)}


class Recorded(torch.optim.Optimizer):
    """Its kinds of steps write down what they get."""

    def __init__(self):
        self.weight, self.got = torch.nn.Parameter(torch.zeros(2)), []
        super().__init__([self.weight], {})

    def closure(self, times=1.0):
        self.weight.grad = times * torch.tensor([3.0, 4.0])
        return 25.0 * times


class ClosureFirst(Recorded):
    def step(self, closure=None, scale=1.0, *, mode=""):
        self.got.append((closure and closure(), scale, mode))
        return "stepped"


class ClosureLast(Recorded):
    def step(self, loss, scale=1.0, closure=None):
        self.got.append((loss, scale, closure and closure(2.0)))
        return "stepped"


class OtherName(Recorded):
    def step(self, evaluate, *more):
        self.got.append((evaluate(times=3.0), *more))
        return "stepped"


class NoClosure(Recorded):
    def step(self, loss, /, *more, **named):
        self.got.append((loss, more, named))
        return "stepped"


class TakesModel(Recorded):
    def step(self, model, scale=1.0):
        self.got.append((type(model).__name__, [*model.parameters()] != [], scale))
        return "stepped"


def closure(optimizer):
    """Stand for the closure of the optimizer that a case makes."""
    return optimizer.closure


def stepped(optimizer, args, kwargs):
    def given(value):
        return value(optimizer) if value is closure else value

    return optimizer.step(*map(given, args), **{name: given(value) for name, value in kwargs.items()})


LOSS = torch.tensor(5.0)
CASES = {
    "behind": (ClosureFirst, (closure, 0.5), {}, (25.0, 0.5, "")),
    "both": (ClosureFirst, (closure, 0.5), {"mode": "fast"}, (25.0, 0.5, "fast")),
    "named": (ClosureFirst, (), {"scale": 0.25, "closure": closure}, (25.0, 0.25, "")),
    "none": (ClosureFirst, (None, 0.5), {}, (None, 0.5, "")),
    "last": (ClosureLast, (LOSS, 0.5, closure), {}, (LOSS, 0.5, 50.0)),
    "last named": (ClosureLast, (LOSS,), {"closure": closure}, (LOSS, 1.0, 50.0)),
    "loss alone": (ClosureLast, (LOSS,), {}, (LOSS, 1.0, None)),
    "another name": (OtherName, (closure, 7), {}, (75.0, 7)),
    "a model": (TakesModel, (torch.nn.Linear(1, 1), 0.5), {}, ("Linear", True, 0.5)),
    "no closure": (NoClosure, (LOSS, "a", 2), {"b": 3}, (LOSS, ("a", 2), {"b": 3})),
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("name", CASES)
def test_arguments_arrive(name, watch):
    kind, args, kwargs, wanted = CASES[name]
    optimizer = kind()
    handle = WATCHES[watch](optimizer)
    for _ in range(3):  # a guard looks at the first two steps
        assert stepped(optimizer, args, kwargs) == "stepped"
    assert optimizer.got == [wanted] * 3
    handle.remove()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if closure in (*case[1], *case[2].values())])
def test_gradients_are_seen_after_the_closure(name):
    kind, args, kwargs, _ = CASES[name]
    optimizer = kind()
    clipping = clip_at_step(optimizer, 1.0)
    watched = gradclip.guard(optimizer)
    stepped(optimizer, args, kwargs)
    assert float(clipping.norm) == optimizer.got[0][0 if kind is not ClosureLast else 2] / 5.0
    assert watched.norm == pytest.approx(1.0, rel=1e-6)
    watched.remove()
