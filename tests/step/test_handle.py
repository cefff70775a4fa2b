"""What clipping at steps returns: numbers to log, and a state that an optimizer's own checkpoint holds."""

import io
import json
import math
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import gradclip
from gradclip import AdaptiveThreshold, QuantileRule, clip_at_step

WAYS = {
    "plain": (clip_at_step, {}),
    "auto": (clip_at_step, {"fused": True}),
    "before a fused step": (partial(clip_at_step, fused=False), {"fused": True}),
    "within a fused step": (partial(clip_at_step, fused=True), {"fused": True}),
}
EACH_WAY = pytest.mark.parametrize(("attach", "settings"), WAYS.values(), ids=WAYS)
NORMS = (1.0, 1.5, 0.7, 30.0, 1.1, 4.0, 0.2, 900.0, 2.0, 1.0)


def made(settings, make=torch.optim.AdamW):
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model, make(model.parameters(), lr=0.1, **settings)


def step(model, optimizer, norm):
    model.weight.grad = torch.tensor([[0.6, 0.8]]) * norm
    optimizer.step()


def as_saved(state):
    """Return what a checkpoint file holds."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain_state(optimizer):
    """Return a state that can be compared."""
    state = optimizer.state_dict()
    state["state"] = {key: {name: x.tolist() for name, x in one.items()} for key, one in state["state"].items()}
    return state


# Numbers


@EACH_WAY
def test_numbers_of_a_fixed_threshold(attach, settings):
    model, optimizer = made(settings)
    clipping = attach(optimizer, 2.0)
    assert clipping.numbers() == {}
    for norm, got, share in ((1.0, 1.0, 0.0), (5.0, 2.0, 1 / 2), (4.0, 2.0, 2 / 3), (0.5, 0.5, 2 / 4)):
        step(model, optimizer, norm)
        numbers = clipping.numbers()
        assert list(numbers) == ["grad_norm", "grad_norm_clipped", "clipped_share", "skipped_share"]
        assert {name: float(number) for name, number in numbers.items()} == pytest.approx(
            {"grad_norm": norm, "grad_norm_clipped": got, "clipped_share": share, "skipped_share": 0.0}
        )
    assert (clipping.steps, clipping.threshold) == (4, 2.0)


@EACH_WAY
@pytest.mark.parametrize("max_norm", [2.0, None])
def test_steps_without_gradients_do_not_count(attach, settings, max_norm):
    model, optimizer = made(settings)
    monitor, adaptive = gradclip.Monitor(), AdaptiveThreshold()
    clipping = attach(optimizer, max_norm or adaptive, monitor=monitor)
    optimizer.step()
    assert clipping.numbers() == {}
    for norm in (5.0, None, 4.0, None):
        model.weight.grad = None
        optimizer.step() if norm is None else step(model, optimizer, norm)
        numbers = {name: float(number) for name, number in clipping.numbers().items()}
        got = norm or 0.0
        assert numbers["grad_norm"] == pytest.approx(got)
        assert numbers["grad_norm_clipped"] == pytest.approx(min(got, max_norm or math.inf))
        assert numbers["clipped_share"] == (1.0 if max_norm else 0.0)
    assert (clipping.steps, monitor.steps, adaptive.steps) == (2, 2, 0 if max_norm else 2)


@EACH_WAY
def test_the_step_by_which_torch_distributed_makes_state_does_not_count(attach, settings):
    model, optimizer = made(settings)
    adaptive = AdaptiveThreshold()
    clipping, watched = attach(optimizer, adaptive), gradclip.guard(optimizer)
    assert get_optimizer_state_dict(model, optimizer)["state"]
    assert (clipping.steps, adaptive.steps, watched.steps, watched.looks) == (0, 0, 0, 0)
    step(model, optimizer, 5.0)
    assert (clipping.steps, adaptive.steps, watched.steps, watched.looks) == (1, 1, 1, 1)
    watched.remove()


@EACH_WAY
def test_the_threshold_of_an_adaptive_threshold_is_a_number(attach, settings):
    model, optimizer = made(settings)
    adaptive = AdaptiveThreshold()
    attach(optimizer, adaptive)
    for norm in NORMS:
        step(model, optimizer, norm)
        json.dumps(adaptive.max_norm, allow_nan=True)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_listed_twice():
    model, _ = made({})
    optimizer = torch.optim.SGD([model.weight, model.weight], lr=1.0, fused=True)
    with pytest.raises(ValueError, match="parameter group 0 lists a parameter twice"):
        clip_at_step(optimizer, 1.0, fused=True)
    assert not optimizer._optimizer_step_pre_hooks
    clip_at_step(optimizer, 1.0)
    step(model, optimizer, 5.0)
    assert model.weight.grad.norm() == pytest.approx(1.0)


@EACH_WAY
@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (math.inf, 0.0)])
def test_thresholds_at_the_ends(attach, settings, threshold, share):
    model, optimizer = made(settings)
    clipping = attach(optimizer, threshold)
    step(model, optimizer, 5.0)
    numbers = clipping.numbers()
    assert (numbers["grad_norm_clipped"], numbers["clipped_share"]) == (min(threshold, 5.0), share)


@EACH_WAY
def test_skipped_steps_got_nothing_and_are_not_clipped(attach, settings):
    model, optimizer = made(settings)
    rule = QuantileRule(factor=2.0, window=4)
    clipping = attach(optimizer, AdaptiveThreshold(rule, skip_above=4.0), nonfinite="skip")
    seen = []
    for norm in (1.0, 1.0, 100.0, math.nan, 3.0):
        step(model, optimizer, norm)
        seen.append(tuple(float(number) for number in clipping.numbers().values()))
    assert [one[1:3] for one in seen] == [(1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0), pytest.approx((2.0, 0.2))]
    assert [one[3] for one in seen] == pytest.approx([0.0, 0.0, 1 / 3, 2 / 4, 2 / 5])
    assert clipping.threshold == 2.0
    assert clipping.max_norm.num_skipped == 2


@EACH_WAY
def test_what_is_not_finite_is_not_hidden(attach, settings):
    model, optimizer = made(settings)
    clipping = attach(optimizer, 1.0)
    step(model, optimizer, math.nan)
    numbers = clipping.numbers()
    assert numbers["grad_norm"].isnan()
    assert numbers["grad_norm_clipped"].isnan()
    assert numbers["clipped_share"] == 0.0


# Saving


@EACH_WAY
@pytest.mark.parametrize("loaded", ["after attaching", "by the handle"])
def test_a_resumed_run_goes_on_to_the_last_bit(attach, settings, loaded):
    def run(norms, model, optimizer, clipping):
        seen = []
        for norm in norms:
            step(model, optimizer, norm)
            seen.append((float(clipping.norm), float(clipping.threshold), model.weight.tolist()))
        return seen

    whole, optimizer = made(settings)
    expected = run(NORMS, whole, optimizer, attach(optimizer, AdaptiveThreshold()))

    first, optimizer = made(settings)
    clipping = attach(optimizer, AdaptiveThreshold())
    assert run(NORMS[:5], first, optimizer, clipping) == expected[:5]
    saved = as_saved({"model": first.state_dict(), "optimizer": optimizer.state_dict(), "own": clipping.state_dict()})

    second, optimizer = made(settings)
    second.load_state_dict(saved["model"])
    if loaded == "by the handle":
        saved["optimizer"].pop("gradclip")
        optimizer.load_state_dict(saved["optimizer"])
    clipping = attach(optimizer, AdaptiveThreshold())
    if loaded == "by the handle":
        clipping.load_state_dict(saved["own"])
    else:
        optimizer.load_state_dict(saved["optimizer"])
    assert run(NORMS[5:], second, optimizer, clipping) == expected[5:]
    assert clipping.max_norm.steps == len(NORMS)
    assert len({threshold for _, threshold, _ in expected}) > 4


@EACH_WAY
def test_a_fixed_threshold_leaves_the_state_as_it_is(attach, settings):
    model, optimizer = made(settings)
    clipping = attach(optimizer, 1.0)
    step(model, optimizer, 5.0)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert clipping.state_dict() == {}
    adaptive = made(settings)[1]
    other = attach(adaptive, AdaptiveThreshold())
    optimizer.load_state_dict(adaptive.state_dict())
    adaptive.load_state_dict(optimizer.state_dict())
    assert (clipping.max_norm, other.max_norm.steps) == (1.0, 0)


def test_an_optimizer_that_does_not_clip_can_load_the_state():
    model, optimizer = made({})
    clip_at_step(optimizer, AdaptiveThreshold())
    step(model, optimizer, 5.0)
    other = made({})[1]
    other.load_state_dict(optimizer.state_dict())
    assert set(other.state_dict()) == {"state", "param_groups"}
    assert all(isinstance(key, torch.Tensor) for key in other.state)


@pytest.mark.after_error
@EACH_WAY
def test_a_state_that_cannot_be_loaded_changes_nothing(attach, settings):
    model, optimizer = made(settings)
    attach(optimizer, AdaptiveThreshold(), ord=1)
    step(model, optimizer, 5.0)
    other_model, other = made(settings)
    clipping = attach(other, AdaptiveThreshold())
    step(other_model, other, 7.0)
    before = plain_state(other)
    with pytest.raises(ValueError, match=r"the state holds norms of ord=1"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict(
            {"state": {}, "param_groups": [], "gradclip": {"max_norm": AdaptiveThreshold().state_dict()}}
        )
    with pytest.raises(ValueError, match="an AdaptiveThreshold's state has"):
        other.load_state_dict({**other.state_dict(), "gradclip": {"max_norm": {}}})
    assert plain_state(other) == before
    assert clipping.max_norm.steps == 1


@pytest.mark.parametrize("flat", [False, True])
def test_what_torch_distributed_checkpoint_keeps(flat):
    """Its functions drop what is not in "state" and "param_groups", and must not fail for it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = made({})
    clipping = clip_at_step(optimizer, AdaptiveThreshold())
    step(model, optimizer, 5.0)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other_model, other = made({})
    resumed = clip_at_step(other, AdaptiveThreshold())
    set_optimizer_state_dict(other_model, other, saved, options=options)
    resumed.load_state_dict(clipping.state_dict())
    for each in ((model, optimizer), (other_model, other)):
        step(*each, 50.0)
    assert clipping.threshold == resumed.threshold == pytest.approx(5.0)
    assert plain_state(optimizer) == plain_state(other)


@EACH_WAY
def test_a_monitor_records_each_step(attach, settings):
    model, optimizer = made(settings)
    monitor = gradclip.Monitor(layers_every=1)
    attach(optimizer, AdaptiveThreshold(QuantileRule(factor=2.0, window=4), skip_above=4.0), monitor=monitor)
    for norm in (1.0, 3.0, 100.0):
        monitor.note(loss=norm)
        step(model, optimizer, norm)
    assert [(s.norm, s.max_norm, s.skipped, s.loss) for s in monitor.records] == [
        (1.0, math.inf, False, 1.0),
        (3.0, 2.0, False, 3.0),
        (pytest.approx(100.0), pytest.approx(4.0, rel=0.5), True, 100.0),
    ]
    assert monitor.num_clipped == monitor.num_skipped == 1
    torch.testing.assert_close(torch.tensor(monitor.layers.norms).flatten(), torch.tensor([1.0, 3.0, 100.0]))


@EACH_WAY
@pytest.mark.after_error
def test_a_monitor_keeps_what_made_a_step_raise(attach, settings):
    model, optimizer = made(settings)
    monitor = gradclip.Monitor()
    attach(optimizer, 1.0, nonfinite="raise", monitor=monitor)
    with pytest.raises(FloatingPointError):
        step(model, optimizer, math.nan)
    assert monitor.steps == 0
    assert "raised, because the gradients hold NaN" in str(monitor.spikes[0])


def test_the_key_of_a_saved_state_is_explained_where_nothing_clips_yet():
    weight = torch.nn.Parameter(torch.zeros(2))
    saving = torch.optim.SGD([{"params": [weight], "max_norm": gradclip.AdaptiveThreshold()}], lr=0.1)
    clip_at_step(saving, 1.0)
    loading = torch.optim.SGD([weight], lr=0.1)
    loading.load_state_dict(saving.state_dict())
    weight.grad = torch.ones(2)
    for call in (clip_at_step, lambda one, c: gradclip.clip_grad_norm_(one.param_groups, c)):
        with pytest.raises(ValueError, match="comes from the saved state of an optimizer that clips"):
            call(loading, 1.0)
    del loading.param_groups[0]["max_norm"]
    clip_at_step(loading, 1.0)
