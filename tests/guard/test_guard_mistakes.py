"""Each mistake, planted in a real loop: the guard names it and how to mend it."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip

import gradclip
from gradclip import clip_at_step
from loops import CLIPS, SEEN, descent, loss_of, named, network, own_clip

pytestmark = pytest.mark.filterwarnings("ignore:no parameter has a gradient", "ignore:.*empty generator")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("zero", ["first", "last", "with zeros"])
def test_clipped_after_the_step(clip, zero):
    model = network()
    optimizer = descent(model)

    def once():
        if zero == "first":
            optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        clip(model.parameters(), 1.0)
        if zero != "first":
            optimizer.zero_grad(set_to_none=zero == "last")

    if clip is own_clip and zero == "with zeros":  # zeros hide what was done to the gradients before
        named(optimizer, once, "not_clipped", "nothing clipped them between backward() and this step")
        return
    found = named(optimizer, once, "after_step", "after the step that used the gradients")
    assert "above 1." in found.sentence
    assert found.step == 2
    assert found.fix == "Clip between loss.backward() and optimizer.step()."


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipped_before_backward(clip, set_to_none):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model)
        clip(model.parameters(), 1.0)
        loss.backward()
        optimizer.step()

    found = named(optimizer, once, "before_backward", "came before backward(), and found no gradients")
    assert found.fix == "Clip after loss.backward() and before optimizer.step()."


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_clipped_before_a_step_whose_closure_computes_the_gradients(clip):
    model = network()
    optimizer = descent(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    def once():
        clip(model.parameters(), 1.0)
        optimizer.step(closure)

    named(optimizer, once, "before_backward", "came before backward(), which the closure calls")


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipped_a_part_of_the_parameters(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model[2:].parameters(), 1.0)
        optimizer.step()

    if clip is own_clip:
        found = named(optimizer, once, "other_parameters", "only some of the gradients were scaled")
    else:
        found = named(optimizer, once, "other_parameters", "did not get 2 of the 6 parameters")
    assert "all parameters of the optimizer" in found.fix


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_clipped_parameters_of_another_model(clip):
    model, old = network(), network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        (loss_of(model) + loss_of(old)).backward()
        clip(old.parameters(), 1.0)
        optimizer.step()

    named(optimizer, once, "other_parameters", "got 6 parameters, and none of them is the optimizer's")


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_clipped_before_unscale(clip, fused, late):
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        clip(model.parameters(), 1.0)
        if late:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    found = named(optimizer, once, "still_scaled", "scale 65536")
    assert "1.526e-05" in found.sentence
    assert "scaler.unscale_(optimizer)" in found.fix


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_a_generator_that_is_used_up(clip):
    model = network()
    optimizer, parameters = descent(model), model.parameters()

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(parameters, 1.0)
        optimizer.step()

    if clip is gradclip.clip_grad_norm_:
        once()
        with pytest.raises(ValueError, match="used up by an earlier loop"):
            once()
        return
    found = named(optimizer, once, "used_up", "got no parameters, so it clipped nothing")
    assert found.step == 2
    assert "list(model.parameters())" in found.fix


def test_an_iterator_of_which_pytorch_does_not_warn():
    model = network()
    optimizer, parameters = descent(model), filter(None, [])

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        torch_clip(parameters, 1.0)
        optimizer.step()

    named(optimizer, once, "used_up", "got no parameters")


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("at_the_end", [True, False])
def test_clipped_at_every_micro_batch(clip, at_the_end):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        for number in range(4):
            loss_of(model).backward()
            if number < 3 or at_the_end:
                clip(model.parameters(), 1.0)
        optimizer.step()

    words = "do not count equally"
    found = named(optimizer, once, "clipped_twice", words)
    if clip is not own_clip:
        assert ("clipped 4 times" if at_the_end else "before the last micro-batch") in found.sentence
    assert "after the last backward() of the accumulation" in found.fix


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_tiny_coefficient(clip, scaled):
    model = network()
    optimizer = descent(model, lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=scaled)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model, scale=1e5)).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    found = named(optimizer, once, "tiny_coefficient", "The gradients were multiplied by")
    number = float(found.sentence.partition("multiplied by ")[2].partition(" ")[0])
    assert 1e-12 < number < 1e-7
    assert "Muon" in found.fix


def test_a_tiny_coefficient_within_the_step():
    model = network()
    optimizer = descent(model, lr=1e-9, fused=True)
    clipping = clip_at_step(optimizer, 1.0, fused=True)

    def once():
        optimizer.zero_grad()
        loss_of(model, scale=1e5).backward()
        optimizer.step()

    named(optimizer, once, "tiny_coefficient", "multiplied by", max_norm=clipping)
