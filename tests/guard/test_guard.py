"""The guard as a user meets it."""

import subprocess
import sys

import pytest
import torch

import gradclip
from loops import descent, loss_of, network


def test_the_name_needs_no_framework():
    code = (
        "import sys, gradclip; from gradclip import *; guard, ClippingWarning;"
        "print([name for name in ('torch', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"max_norm": -1.0}, ValueError, "max_norm must not be negative"),
        ({"max_norm": "1"}, TypeError, "max_norm"),
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"ord": 0.5}, ValueError, "ord"),
        ({"optimizer": torch.nn.Linear(1, 1)}, TypeError, "must be an optimizer of torch.optim, .* got Linear"),
    ],
)
@pytest.mark.after_error
def test_what_is_wrong_is_said_before_anything_is_watched(change, kind, words):
    optimizer = descent(network())
    before = torch.nn.utils.clip_grad._clip_grads_with_norm_
    with pytest.raises(kind, match=words):
        gradclip.guard(**({"optimizer": optimizer, "max_norm": 1.0} | change))
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is before


def test_it_prints_well_and_can_be_removed():
    torch.manual_seed(0)
    model = network()
    optimizer = descent(model)
    watched = gradclip.guard(optimizer, 1.0)
    assert repr(watched) == "StepGuard(SGD, max_norm=1.0, 0 steps, 0 looks, no mistake)"
    loss_of(model).backward()
    norm = gradclip.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert norm > 10
    assert repr(watched) == "StepGuard(SGD, max_norm=1.0, 1 step, 1 look, norm 1 at the last, no mistake)"
    watched.remove()
    watched.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(one._backward_hooks for one in model.parameters())
    optimizer.step()
    assert watched.steps == 1


def test_a_threshold_that_follows_is_told_as_it_was_passed():
    optimizer = descent(network())
    max_norm = gradclip.AdaptiveThreshold()
    with (
        gradclip.guard(optimizer, max_norm) as alone,
        gradclip.clip_at_step(optimizer, max_norm) as clipping,
        gradclip.guard(optimizer, clipping) as of_handle,
    ):
        told = list(map(repr, (alone, of_handle)))
    assert all("max_norm=AdaptiveThreshold(SpreadRule(" in one for one in told), told


def test_what_a_trainer_wraps_around_an_optimizer():
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = descent(network())
    watched = gradclip.guard(Wrapped(Wrapped(optimizer)))
    assert watched._optimizer is optimizer
    watched.remove()
