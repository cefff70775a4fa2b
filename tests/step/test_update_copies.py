"""Before a step that clips its updates, few parameters are copied at a time."""

import pytest
import torch

import gradclip._src.step.update as update
from gradclip import clip_at_step, clip_update_at_step
from updated import moved, parameters, steps, values


def test_only_some_parameters_are_copied_at_a_time(monkeypatch):
    """Counted: the elements that are copied and not yet freed, of sixteen parameters of 6."""
    monkeypatch.setattr(update, "_COPIED_AT_ONCE", 48)
    copied = []
    plain = update._copied
    monkeypatch.setattr(update, "_copied", lambda *given: copied.append(len(given[1])) or plain(*given))
    optimizer = torch.optim.AdamW(parameters(16), lr=0.1)
    clip_update_at_step(optimizer)
    steps(optimizer, 1.0)
    assert copied == [2] * 8
    clip_at_step(optimizer, 1.0)
    steps(optimizer, 1.0)
    assert copied == [2] * 16
    optimizer.register_step_pre_hook(lambda *_: None)  # it is the last for one step
    for expected in ([16], [16] + [2] * 8):
        steps(optimizer, 1.0)
        assert copied == [2] * 16 + expected


def test_copies_have_the_values_and_layouts_of_what_they_copy():
    some = [torch.randn(3, 5).t(), torch.randn(4, 6)[:, ::2], torch.tensor(2.0), torch.randn(2, 3, 4, 4).bfloat16()]
    some[3] = some[3].to(memory_format=torch.channels_last)
    room = update._Room()
    for those in (some[:2], some, some[::-1]):
        for mine, theirs in zip(room.copies(those), those, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
            assert mine.stride() == theirs.clone().stride()
            assert mine.data_ptr() % 64 == 0


def test_copies_in_host_memory_do_not_follow_the_default_device():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    clipping, before = clip_update_at_step(optimizer), values(optimizer)
    for one in optimizer.param_groups[0]["params"]:
        one.grad = torch.full_like(one, 5.0)
    with torch.device("meta"):
        optimizer.step()
    assert moved(optimizer, before) == pytest.approx([1.0] * 4, rel=1e-5)
    assert clipping.rms.item() == pytest.approx(5.0)
