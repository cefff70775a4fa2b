"""What a guard keeps while its optimizer waits: nothing of other models, and no more events than a bound."""

import gc
import weakref

import pytest
import torch

import gradclip
import gradclip.integrations.torch
from gradclip._src.guard import window


def trained(clip):
    """Return a parameter of a model that is trained elsewhere, and clipped by `clip`."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip([parameter])
    return weakref.ref(parameter)


def gone(found):
    gc.collect()
    return [one() is None for one in found]


def by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 1.0)


def by_norm(parameters):
    gradclip.clip_grad_norm_(parameters, 1.0)


@pytest.fixture
def idle():
    """Yield a parameter whose guarded optimizer does not step, and the guard."""
    weight = torch.nn.Parameter(torch.zeros(2))
    guard = gradclip.guard(torch.optim.SGD([weight], lr=0.1), 1.0)
    yield weight, guard
    guard.remove()


@pytest.mark.parametrize("clip", [by_value, by_norm])
def test_models_that_are_clipped_while_an_optimizer_is_idle_are_freed(idle, clip):
    assert gone([trained(clip) for _ in range(3)]) == [True] * 3
    assert len(idle[1]._window.events) == 1


@pytest.mark.parametrize("clip", [by_value, by_norm])
def test_parameters_that_are_clipped_with_those_of_the_optimizer_are_freed(idle, clip):
    weight, _ = idle
    weight.grad = torch.ones(2)
    assert gone([trained(lambda others: clip([weight, *others]))]) == [True]


def test_clipping_at_the_step_keeps_no_parameters_of_others():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    clipping = gradclip.clip_at_step(optimizer, 1.0)
    weight.grad = torch.ones(2)
    assert gone([trained(lambda others: by_norm([weight, *others]))]) == [True]
    clipping.remove()


def test_calls_that_clip_the_parameters_of_an_idle_optimizer_are_bounded(idle, monkeypatch):
    monkeypatch.setattr(window, "_MOST_EVENTS", 8)
    weight, guard = idle
    for _ in range(20):
        weight.backward(torch.ones(2))
        by_norm([weight])
    assert len(guard._window.events) < 12


@pytest.fixture
def waited(idle, monkeypatch):
    """Yield the parameter, its optimizer and the guard, after more passes and calls than are noted."""
    monkeypatch.setattr(window, "_MOST_EVENTS", 8)
    weight, guard = idle
    for _ in range(10):
        weight.grad = None
        weight.backward(torch.tensor([3.0, 4.0]))
        by_norm([weight])
    return weight, guard._optimizer, guard


def test_of_what_was_not_noted_nothing_is_said(waited):
    """The first step is clipped as it should be, or by a function of the user's own."""
    weight, optimizer, guard = waited
    weight.backward(torch.tensor([3.0, 4.0]))
    by_norm([weight])
    for _ in range(2):
        optimizer.step()
        weight.grad = torch.tensor([0.6, 0.8])
    assert (guard.reports, guard.looks) == ([], 2)


@pytest.mark.parametrize(
    ("clips", "kind", "words"),
    [(True, "before_backward", "came before backward"), (False, "not_clipped", "nothing clipped them between")],
)
def test_a_mistake_after_a_long_wait_is_named_when_it_is_known(waited, clips, kind, words):
    weight, optimizer, guard = waited
    for step in range(2):
        weight.grad = None
        if clips:
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        weight.backward(torch.tensor([3.0, 4.0]))
        if step == 0:
            optimizer.step()
            assert guard.reports == []
    with pytest.warns(gradclip.ClippingWarning, match=words):
        optimizer.step()
    assert [(one.kind, one.step) for one in guard.reports] == [(kind, 2)]


def test_what_is_not_finite_is_told_after_a_long_wait(waited):
    weight, optimizer, guard = waited
    weight.grad[0] = torch.nan
    with pytest.warns(gradclip.ClippingWarning, match="so its parameters become NaN"):
        optimizer.step()
    assert [one.kind for one in guard.reports] == ["nonfinite"]


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_dropped_model_is_freed_before_the_steps_of_its_guarded_optimizer(steps, passes):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [weakref.ref(gradclip.guard(optimizer)), weakref.ref(model.weight)]
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for _ in range(passes):
        model(torch.ones(1, 2)).sum().backward()
    del model, optimizer
    assert gone(found) == [True, True]


def test_parameters_that_were_clipped_may_be_swapped(idle):
    weight, _ = idle
    weight.grad = torch.ones(2)
    by_norm([weight])
    weight.grad = None
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
    assert weight.dtype == torch.float64


def test_a_parameter_added_after_the_call_that_clipped_it_was_clipped():
    weight, added = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = gradclip.guard(optimizer, 1.0, on_mistake="raise")
    for one in (weight, added):
        one.backward(torch.tensor([3.0, 4.0]))
    by_norm([weight, added])
    optimizer.add_param_group({"params": [added]})
    optimizer.step()
    assert guard.reports == []
    guard.remove()


def test_a_call_for_another_model_is_still_told():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = gradclip.guard(optimizer, 1.0)
    other = torch.nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    weight.backward(torch.tensor([3.0, 4.0]))
    for count in (1, 3):
        gradclip.clip_grad_norm_([other] * count, 1.0)
    with pytest.warns(gradclip.ClippingWarning, match="got 3 parameters, and none of them is the optimizer's"):
        optimizer.step()
    guard.remove()
