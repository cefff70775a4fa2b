"""What a guard says of steps: those that are skipped, not clipped, or not finite."""

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip

import gradclip
from gradclip import clip_at_step
from loops import SEEN, descent, loss_of, named, network

pytestmark = pytest.mark.filterwarnings("ignore:no parameter has a gradient", "ignore:.*empty generator")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def broken(model, when):
    return loss_of(model) * (math.nan if when else 1.0)


def test_the_first_step_that_a_policy_skips_is_told():
    model = network()
    optimizer = descent(model)
    turns = iter(range(100))

    def once():
        optimizer.zero_grad()
        broken(model, next(turns) == 4).backward()
        gradclip.clip_grad_norm_(model.parameters(), 1.0, nonfinite="drop")
        optimizer.step()

    found = named(optimizer, once, "skipped", "A step was skipped", steps=20)
    assert found.step == 5
    assert "NaN or infinity in the batch" in found.fix


def test_the_first_step_that_an_adaptive_threshold_skips_is_told():
    model, max_norm = network(), gradclip.AdaptiveThreshold(skip_above=4.0)
    optimizer = descent(model)
    turns = iter(range(100))

    def once():
        optimizer.zero_grad()
        (loss_of(model) * (1e6 if next(turns) == 13 else 1.0)).backward()
        gradclip.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    found = named(optimizer, once, "skipped", "A step was skipped", steps=20, max_norm=max_norm)
    assert found.step == 14


def test_the_first_step_that_is_skipped_within_the_step_is_told():
    model = network()
    optimizer = descent(model, fused=True)
    clipping = clip_at_step(optimizer, 1.0, nonfinite="skip", fused=True)
    turns = iter(range(100))

    def once():
        optimizer.zero_grad()
        broken(model, next(turns) == 7).backward()
        optimizer.step()

    found = named(optimizer, once, "skipped", "A step was skipped", steps=20, max_norm=clipping)
    assert found.step == 8


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_the_first_step_that_the_loop_leaves_out_is_told(clip):
    model = network()
    optimizer = descent(model)
    turns = iter(range(100))

    def once():
        optimizer.zero_grad()
        broken(model, next(turns) == 4).backward()
        if clip(model.parameters(), 1.0).isfinite():
            optimizer.step()

    assert named(optimizer, once, "skipped", "A step was skipped", steps=20).step == 4


@pytest.mark.parametrize("fused", [False, True])
def test_a_streak_of_steps_that_a_scaler_skips(fused):
    model = network()
    optimizer = descent(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    turns = iter(range(100))

    def once():
        optimizer.zero_grad()
        scaler.scale(broken(model, next(turns) in (2, 5, 6, 10, 11, 12, 13))).backward()
        scaler.unscale_(optimizer)
        torch_clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    named(optimizer, once, "skipped", "3 steps in a row were skipped", steps=20)


@pytest.mark.filterwarnings("ignore:step .* skipped")
@pytest.mark.parametrize("way", ["policy", "loop", "scaler", "fused scaler", "folded"])
def test_too_many_skipped_steps_raise(way):
    model = network()
    optimizer = descent(model, fused=way in ("fused scaler", "folded"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled="scaler" in way)
    if way == "folded":
        clip_at_step(optimizer, 1.0, nonfinite="skip", fused=True)
    watched = gradclip.guard(optimizer, 1.0, stop_after=5)
    taken = []

    def once(turn):
        taken.append(turn)
        optimizer.zero_grad()
        scaler.scale(broken(model, turn in (3, 4, 5, 6) or turn > 10)).backward()
        scaler.unscale_(optimizer)
        norm = torch.tensor(1.0)
        if way != "folded":
            norm = gradclip.clip_grad_norm_(
                model.parameters(), 1.0, nonfinite="drop" if way == "policy" else "propagate"
            )
        if way != "loop" or norm.isfinite():
            scaler.step(optimizer)
        scaler.update()

    with pytest.raises(gradclip.ClippingError, match="5 steps in a row were skipped, and stop_after is 5"):
        list(map(once, range(30)))
    assert taken[-1] == (16 if way == "loop" else 15)  # where a loop leaves a step out, the next call shows it
    assert watched.num_skipped == 9
    assert [one.kind for one in watched.reports] == ["skipped"]
    watched.remove()


# What else a step gets


def test_not_clipped_at_all():
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    named(optimizer, once, "not_clipped", "nothing clipped them between backward() and this step")


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_clipped_to_another_threshold(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 5.0)
        optimizer.step()

    named(optimizer, once, "not_clipped", "of norm 5, above 1: clip_grad_norm_ was called with the threshold 5.")


def test_an_adaptive_threshold_that_nothing_uses():
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    named(
        optimizer, once, "not_clipped", "nothing has used the AdaptiveThreshold", max_norm=gradclip.AdaptiveThreshold()
    )


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_a_step_with_nan(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        broken(model, True).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    found = named(optimizer, once, "nonfinite", "norm nan")
    assert "norm.isfinite()" in found.fix


@pytest.mark.after_error
def test_raising_leaves_the_parameters_as_they_were():
    model = network()
    optimizer = descent(model)
    watched = gradclip.guard(optimizer, 1.0, on_mistake="raise")
    before = [one.detach().clone() for one in model.parameters()]
    loss_of(model).backward()
    torch_clip(model[0].parameters(), 1.0)
    with pytest.raises(gradclip.ClippingError, match=r"step 1: The call of clip_grad_norm_ did not get 4 of the 6"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()  # once for each kind
    assert not all(map(torch.equal, before, model.parameters()))
    watched.remove()
