"""`clip_at_step` on an optimizer that is clipped already, wrapped or copied; its arguments and its end."""

import copy
import pickle

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from plain_descent import plain


@pytest.mark.parametrize("second", [True, False, "auto"])
@pytest.mark.parametrize("first", [True, False, "auto"])
def test_twice_is_refused(first, second):
    weight, optimizer = plain(fused=True)
    clipping = clip_at_step(optimizer, 1.0, fused=first)
    with pytest.raises(ValueError, match="was already called for it"):
        clip_at_step(optimizer, 2.0, fused=second)
    clipping.remove()
    clip_at_step(optimizer, 2.5, fused=second)
    optimizer.step()
    assert weight.tolist() == pytest.approx([-1.5, -2.0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapped_optimizer(fused):
    """Trainers wrap optimizers in objects that look like one, and name the inner one `optimizer`."""

    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

        def step(self, closure=None):
            self.optimizer.step(closure)

    weight, optimizer = plain(fused=fused)
    wrapped = Wrapped(Wrapped(optimizer))
    clip_at_step(wrapped, 1.0)
    wrapped.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    with pytest.raises(ValueError, match="already"):
        clip_at_step(optimizer, 1.0)


class Engine:
    """What steps by itself, and is no optimizer of PyTorch."""

    param_groups = ()

    def step(self):
        """Step."""


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (Engine(), r"Engines step by themselves: for them, call gradclip\.clip_at_step with the engine"),
        *((one, r"call gradclip\.clip_grad_norm_\(parameters") for one in ("Adam", None, torch.nn.Linear(1, 1))),
    ],
    ids=lambda given: type(given).__name__,
)
def test_other_objects_are_refused(given, advice):
    message = f"optimizer must be an optimizer of torch.optim.* got {type(given).__name__}.*{advice}"
    with pytest.raises(TypeError, match=message):
        clip_at_step(given, 1.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("fused", [False, True])
def test_a_copy_does_not_clip(copied, fused):
    weight, optimizer = plain(fused=fused)
    clip_at_step(optimizer, 1.0)
    other = copied(optimizer)
    (its,) = other.param_groups[0]["params"]
    its.grad = torch.tensor([3.0, 4.0])
    other.step()
    assert its.tolist() == [-3.0, -4.0]
    clip_at_step(other, 2.5)
    its.grad = torch.tensor([3.0, 4.0])
    other.step()
    assert its.tolist() == pytest.approx([-4.5, -6.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])


def test_a_step_that_calls_the_step_of_its_base_clips_once():
    """PyTorch then runs the hooks twice, and the second norm would be that of clipped gradients."""

    class Scheduled(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    weight, plain_one = plain()  # from now on PyTorch runs hooks in the step of SGD itself
    optimizer = Scheduled([weight], lr=1.0)
    max_norm = gradclip.AdaptiveThreshold()
    clipping = clip_at_step(optimizer, max_norm)
    for number in (1, 2):
        weight.grad = torch.tensor([3.0, 4.0]) * 10.0 ** (number - 1)
        optimizer.step()
        assert clipping.norm == 5.0 * 10.0 ** (number - 1)
        assert max_norm.steps == clipping.steps == number
    assert weight.tolist() == pytest.approx([-6.0, -8.0])
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer._optimizer_step_pre_hooks.popitem()
    weight.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    assert clipping.norm == 50.0
    assert type(plain_one) is torch.optim.SGD


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"nonfinite": "drop"}, ValueError, "nonfinite must be one of"),
        ({"ord": 0}, ValueError, "ord must be"),
        ({"max_norm": -1.0}, ValueError, "max_norm must not be negative"),
        ({"max_norm": "large"}, TypeError, "max_norm"),
        ({"monitor": gradclip.Monitor}, TypeError, "monitor must be a gradclip.Monitor"),
        ({"process_group": 3}, TypeError, "process_group"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_arguments_are_checked_at_once(fused, arguments, error, message):
    _, optimizer = plain(fused=fused)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(error, match=message):
        clip_at_step(optimizer, **{"max_norm": 1.0, **arguments})
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    clip_at_step(optimizer, 1.0)


@pytest.mark.after_error
@pytest.mark.parametrize("fused", [False, True])
def test_the_threshold_may_change(fused):
    weight, optimizer = plain(fused=fused)
    clipping = clip_at_step(optimizer, 1.0)
    clipping.max_norm = torch.tensor(2.5)
    optimizer.step()
    assert weight.tolist() == pytest.approx([-1.5, -2.0])
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        clipping.max_norm = -1.0
    assert clipping.max_norm == 2.5
    clipping.max_norm = gradclip.AdaptiveThreshold()
    optimizer.step()
    assert clipping.max_norm.steps == 1


@pytest.mark.parametrize("fused", [False, True])
def test_remove_ends_it(fused):
    weight, optimizer = plain(fused=fused)
    before = set(vars(optimizer))
    clipping = clip_at_step(optimizer, 1.0)
    clipping.remove()
    clipping.remove()
    optimizer.step()
    assert weight.tolist() == [-3.0, -4.0]
    assert set(vars(optimizer)) == before
