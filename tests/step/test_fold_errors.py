"""What folding refuses, and what to do instead."""

import pytest
import torch

from gradclip import clip_at_step


def parameters():
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]


def plain():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    return weight, torch.optim.SGD([weight], lr=1.0, fused=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "SGD and Adagrad of torch.optim .* got RMSprop. To clip before the step, "),
        (lambda p: torch.optim.LBFGS(p), "got LBFGS"),
        (lambda p: "Adam", "got str"),
    ],
)
def test_other_optimizers_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        clip_at_step(make(parameters()), 1.0, fused=True)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": False}])
def test_optimizers_that_are_not_fused_are_refused(settings):
    with pytest.raises(ValueError, match=r"not created with fused=True .* Create it as Adam\(..., fused=True\)"):
        clip_at_step(torch.optim.Adam(parameters(), **settings), 1.0, fused=True)


def test_a_group_that_is_no_longer_fused_is_refused_at_the_step():
    weight, optimizer = plain()
    clip_at_step(optimizer, 1.0, fused=True)
    optimizer.load_state_dict(torch.optim.SGD([weight], lr=1.0).state_dict())
    with pytest.raises(ValueError, match="for all of its parameter groups"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nonfinite": "zero"}, "must write the gradients before it"),
        ({"nonfinite": "drop"}, "nonfinite must be one of"),
        ({"ord": 0}, "ord must be"),
        ({"max_norm": -1.0}, "max_norm must not be negative"),
        ({"max_norm": 2.0**101}, "max_norm must be 0, inf, or between"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    _, optimizer = plain()
    with pytest.raises(ValueError, match=message):
        clip_at_step(optimizer, **{"max_norm": 1.0, **arguments}, fused=True)
    clip_at_step(optimizer, 1.0, fused=True)


def test_twice_is_refused():
    _, optimizer = plain()
    clip_at_step(optimizer, 1.0, fused=True)
    with pytest.raises(ValueError, match="was already called for it"):
        clip_at_step(optimizer, 2.0, fused=True)


@pytest.mark.after_error
@pytest.mark.parametrize("fused", [True, "auto"])
@pytest.mark.parametrize("late", ["in the group", "in another"])
def test_a_parameter_that_is_added_twice_later_is_refused_at_the_step(fused, late):
    weight, optimizer = plain()
    clip_at_step(optimizer, 1.0, fused=fused)
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
        clip_at_step(ByHand([weight], lr=1.0, fused=True), 1.0, fused=True)
    optimizer = Named([weight], lr=1.0, fused=True)
    clip_at_step(optimizer, 1.0, fused=True)
    optimizer.step()
    assert weight.detach().tolist() == pytest.approx([-0.6, -0.8])
