"""When a guard looks, and what it does at other steps."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip import clip_at_step
from loops import SEEN, descent, loss_of, network


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(watch, clip, steps=10):
    """Return how many operations each step takes."""
    torch.manual_seed(0)
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW)
    watched = gradclip.guard(optimizer, 1.0, every=5) if watch else None
    counts = []
    for _ in range(steps):
        with Operations() as mode:
            optimizer.zero_grad()
            loss_of(model).backward()
            clip(model.parameters(), 1.0)
            optimizer.step()
        counts.append(mode.count)
    if watched:
        watched.remove()
    return counts


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_other_steps_do_nothing_more(clip):
    """Not one operation: no pass over a gradient, and nothing that could wait for a device."""
    more = [one - other for one, other in zip(operations(True, clip), operations(False, clip), strict=True)]
    looks = {0, 1, 4, 9}
    opening = {3, 8}  # at the end of the step before a look, the norms of a few gradients are taken
    assert [step for step, count in enumerate(more) if count] == sorted(looks | opening)
    assert max(more) < 100


def test_a_look_waits_for_hooks_that_came_later():
    torch.manual_seed(0)
    model = network()
    optimizer = descent(model, fused=True)
    watched = gradclip.guard(optimizer, 1.0, every=5)
    looked = []
    for step in range(12):
        if step == 4:
            clip_at_step(optimizer, 1.0, fused=True)  # after the window for step 5 was opened
        optimizer.zero_grad()
        loss_of(model).backward()
        if step < 4:
            gradclip.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        looked.append(watched.looks)
    watched.remove()
    assert watched.reports == []
    assert looked == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]


def test_the_norm_is_the_one_that_the_update_uses():
    torch.manual_seed(0)
    model = network()
    optimizer = descent(model, lr=1.0)
    watched = gradclip.guard(optimizer, 1.0, every=1)
    for _ in range(5):
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, scale=0.1).backward()
        gradclip.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
        assert watched.norm == pytest.approx(float(gradclip.global_norm(moved)), rel=1e-4)
    watched.remove()


def test_a_guard_raises_once_and_goes_on():
    torch.manual_seed(0)
    model = network()
    optimizer = descent(model)
    watched = gradclip.guard(optimizer, 1.0, every=1, on_mistake="raise")
    raised = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model).backward()
        try:
            optimizer.step()
        except gradclip.ClippingError as error:
            raised.append((step, str(error)))
    watched.remove()
    ((step, words),) = raised
    assert (step, watched.looks) == (1, 4)  # the step that raised opened no look at the next
    assert words == str(watched.reports[0])
