"""What folding refuses, and what to do instead."""

import pytest
import torch

from gradclip.integrations.torch import clip_at_step, fold_into


def parameters():
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]


def plain():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    return weight, torch.optim.SGD([weight], lr=1.0, fused=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "Adam, AdamW, SGD and Adagrad of torch.optim, got RMSprop. Call gradclip"),
        (lambda p: torch.optim.LBFGS(p), "got LBFGS"),
        (lambda p: "Adam", "got str"),
    ],
)
def test_other_optimizers_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        fold_into(make(parameters()), 1.0)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": False}])
def test_optimizers_that_are_not_fused_are_refused(settings):
    with pytest.raises(ValueError, match=r"not created with fused=True .* Create it as Adam\(..., fused=True\)"):
        fold_into(torch.optim.Adam(parameters(), **settings), 1.0)


def test_a_group_that_is_no_longer_fused_is_refused_at_the_step():
    weight, optimizer = plain()
    fold_into(optimizer, 1.0)
    optimizer.load_state_dict(torch.optim.SGD([weight], lr=1.0).state_dict())
    with pytest.raises(ValueError, match="for all of its parameter groups"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nonfinite": "zero"}, "must write the gradients before the step"),
        ({"nonfinite": "drop"}, "nonfinite must be one of"),
        ({"ord": 0}, "ord must be"),
        ({"max_norm": -1.0}, "max_norm must not be negative"),
        ({"max_norm": 2.0**101}, "max_norm must be 0, inf, or between"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    _, optimizer = plain()
    with pytest.raises(ValueError, match=message):
        fold_into(optimizer, **{"max_norm": 1.0, **arguments})
    fold_into(optimizer, 1.0)


def test_twice_is_refused():
    _, optimizer = plain()
    fold_into(optimizer, 1.0)
    with pytest.raises(ValueError, match="was already called for this optimizer"):
        fold_into(optimizer, 2.0)


@pytest.mark.after_error
@pytest.mark.parametrize("attach", [fold_into, clip_at_step])
@pytest.mark.parametrize("late", ["in the group", "in another"])
def test_a_parameter_that_is_added_twice_later_is_refused_at_the_step(attach, late):
    weight, optimizer = plain()
    attach(optimizer, 1.0)
    added, number = weight, 0
    if late == "in another":
        added, number = torch.nn.Parameter(torch.zeros(2)), 1
        added.grad = torch.tensor([3.0, 4.0])
        optimizer.add_param_group({"params": [added]})
    optimizer.param_groups[number]["params"].append(added)
    with pytest.raises(ValueError, match=f"group {number} lists a parameter twice.*divides its gradient twice"):
        optimizer.step()
    assert weight.tolist() == added.tolist() == [0.0, 0.0]
    optimizer.param_groups[number]["params"].pop()
    optimizer.step()
    assert weight.tolist() != [0.0, 0.0]


def test_a_step_of_its_own_is_refused():
    class ByHand(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("it need not divide gradients")

    class Named(torch.optim.SGD):
        pass

    weight, _ = plain()
    with pytest.raises(TypeError, match="ByHand has its own step method"):
        fold_into(ByHand([weight], lr=1.0, fused=True), 1.0)
    optimizer = Named([weight], lr=1.0, fused=True)
    fold_into(optimizer, 1.0)
    optimizer.step()
    assert weight.detach().tolist() == pytest.approx([-0.6, -0.8])
