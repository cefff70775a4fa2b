"""Thresholds by patterns of names, and gradients chosen by names, at each step."""

import math

import pytest
import torch

import gradclip
from gradclip import AdaptiveThreshold, QuantileRule, clip_at_step
from gradclip._src.step.wrapped import _NAMES, groups_of, name_parameters


def made(kind=torch.optim.SGD, *, fused=None, named=True):
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    parameters = model.named_parameters() if named else model.parameters()
    return model, kind(parameters, lr=1.0, fused=fused)


def step(model, optimizer, weight=5.0, bias=2.0):
    model.weight.grad = torch.tensor([[0.6, 0.8]]) * weight
    model.bias.grad = torch.tensor([bias])
    optimizer.step()


def moved(model):
    return [model.weight.norm().item(), model.bias.abs().item()]


@pytest.mark.parametrize("fused", [None, True])
def test_each_pattern_has_its_threshold(fused):
    model, optimizer = made(fused=fused)
    clipping = clip_at_step(optimizer, {"bias": 1.0, "*": None})
    step(model, optimizer)
    assert moved(model) == pytest.approx([5.0, 1.0])
    assert clipping.norm == pytest.approx(math.hypot(5.0, 2.0))
    assert {name: round(x.item(), 4) for name, x in clipping.numbers().items()} == {
        "grad_norm": 5.3852,
        "grad_norm_clipped": 5.099,
        "clipped_share": 1.0,
        "skipped_share": 0.0,
    }
    assert repr(clipping) == "StepClipping(SGD, max_norm={'bias': 1.0, '*': None}, scope='global', fused=False, 1 step)"
    clipping.max_norm = {"*": 1.0}
    step(model, optimizer, 3.0, 4.0)
    assert moved(model) == pytest.approx([5.6, 1.8])


def test_what_is_passed_may_change_without_effect():
    model, optimizer = made()
    patterns = {"*": 1.0}
    clipping = clip_at_step(optimizer, patterns)
    patterns["*"] = 100.0
    step(model, optimizer, 3.0, 4.0)
    assert moved(model) == pytest.approx([0.6, 0.8])
    with pytest.raises(TypeError):
        clipping.max_norm["*"] = 100.0


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("named", "max_norm", "error", "message"),
    [
        (False, {"*": 1.0}, ValueError, "has no name that a pattern of max_norm could match. Make the optimizer with"),
        (True, {"bias": 1.0}, ValueError, "no pattern of max_norm matches weight"),
        (True, {"head.*": 1.0, "*": 1.0}, ValueError, r"the pattern 'head\.\*' of max_norm matches no name"),
        (True, {"*": -1.0}, ValueError, r"max_norm\['\*'\] must not be negative"),
        (True, {"*": "large"}, TypeError, r"max_norm\['\*'\] must be a real number"),
        (True, {1: 1.0}, TypeError, "max_norm maps patterns of the names of parameters to thresholds"),
    ],
)
def test_patterns_are_checked_at_once(named, max_norm, error, message):
    _, optimizer = made(named=named)
    with pytest.raises(error, match=message):
        clip_at_step(optimizer, max_norm)
    assert not optimizer._optimizer_step_pre_hooks
    clipping = clip_at_step(optimizer, 1.0)
    with pytest.raises(error, match=message):
        clipping.max_norm = max_norm
    assert clipping.max_norm == 1.0


@pytest.mark.parametrize("settings", [{"max_norm": {"*": 1.0}}, {"where": "bias"}, {"integers": "raise"}])
def test_within_a_fused_step_they_are_refused(settings):
    _, optimizer = made(fused=True)
    with pytest.raises(ValueError, match=r"a fused step .* pass fused=False"):
        clip_at_step(optimizer, **{"max_norm": 1.0, "fused": True, **settings})
    clipping = clip_at_step(optimizer, 1.0)
    with pytest.raises(ValueError, match=r"a fused step .* pass fused=False"):
        clipping.max_norm = {"*": 1.0}


def rule():
    return QuantileRule(factor=2.0, window=4)


def test_thresholds_of_patterns_follow_and_are_saved():
    def run(model, optimizer, norms):
        for norm in norms:
            step(model, optimizer, norm, norm / 2)

    def attached(optimizer):
        return clip_at_step(optimizer, {"bias": AdaptiveThreshold(rule()), "*": AdaptiveThreshold(rule())})

    model, optimizer = made()
    clipping = attached(optimizer)
    run(model, optimizer, (1.0, 2.0, 8.0))
    saved = optimizer.state_dict()
    assert set(saved["gradclip"]["patterns"]) == {"bias", "*"}
    other_model, other = made()
    resumed = attached(other)
    other.load_state_dict(saved)
    other_model.load_state_dict(model.state_dict())
    for one in ((model, optimizer), (other_model, other)):
        run(*one, (50.0, 3.0))
    assert moved(model) == moved(other_model)
    assert [one.steps for one in resumed.max_norm.values()] == [5, 5]
    assert [one.num_clipped for one in clipping.max_norm.values()] == [2, 2]


def test_a_spike_in_one_pattern_skips_its_parameters():
    model, optimizer = made()
    spiking = AdaptiveThreshold(rule(), skip_above=4.0)
    clip_at_step(optimizer, {"bias": spiking, "*": 100.0})
    for bias in (1.0, 50.0):
        step(model, optimizer, 1.0, bias)
    assert moved(model) == pytest.approx([2.0, 1.0])
    assert model.bias.grad is None
    assert spiking.num_skipped == 1


def test_nan_in_one_pattern_skips_the_step():
    model, optimizer = made()
    clip_at_step(optimizer, {"bias": 1.0, "*": 1.0}, nonfinite="skip")
    step(model, optimizer, 1.0, math.nan)
    assert moved(model) == [0.0, 0.0]


def test_a_threshold_of_a_pattern_follows_one_optimizer():
    _, first = made()
    _, second = made()
    one = AdaptiveThreshold()
    with clip_at_step(first, {"*": one}), pytest.raises(ValueError, match="already follows another optimizer"):
        clip_at_step(second, {"*": one})
    clip_at_step(second, {"*": one})


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(
    "where", ["weight", ["w*"], lambda name: name != "bias"], ids=["a name", "patterns", "a function"]
)
def test_only_what_is_chosen_is_clipped(where, fused):
    model, optimizer = made(fused=fused)
    monitor = gradclip.Monitor()
    clipping = clip_at_step(optimizer, 1.0, where=where, monitor=monitor)
    step(model, optimizer)
    assert moved(model) == pytest.approx([1.0, 2.0])
    assert clipping.norm == monitor.last.norm == pytest.approx(5.0)


def test_a_skipped_step_is_skipped_for_what_is_not_chosen_too():
    model, optimizer = made()
    adaptive = AdaptiveThreshold(rule())
    clip_at_step(optimizer, adaptive, where="weight", nonfinite="skip")
    step(model, optimizer, math.nan)
    assert moved(model) == [0.0, 0.0]
    assert adaptive.num_skipped == 1


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("named", "settings", "message"),
    [
        (False, {"where": "bias"}, "has no name that where could match. Make the optimizer with"),
        (True, {"where": "head"}, "matches no name|chooses no"),
        (True, {"integers": "drop"}, "integers must be 'keep'"),
    ],
)
def test_choices_are_checked_at_once(named, settings, message):
    _, optimizer = made(named=named)
    with pytest.raises(ValueError, match=message):
        clip_at_step(optimizer, 1.0, **settings)
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("fused", [None, True])
def test_names_that_the_optimizer_does_not_have(fused):
    model, optimizer = made(fused=fused, named=False)
    name_parameters(optimizer, model.named_parameters())
    extra = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    monitor = gradclip.Monitor(layers_every=1)
    with clip_at_step(optimizer, 1.0, monitor=monitor):
        extra.grad = torch.ones(1)
        step(model, optimizer)
    assert monitor.last.layers.names == ("weight", "bias", "parameters.1.params.0")
    assert all("param_names" not in group for group in optimizer.state_dict()["param_groups"])
    del optimizer.param_groups[1]
    with clip_at_step(optimizer, {"bias": 1.0, "*": None}):
        step(model, optimizer)


def test_a_name_is_not_that_of_a_parameter_which_is_gone():
    model, optimizer = made(named=False)
    gone = torch.nn.Parameter(torch.zeros(1))
    name_parameters(optimizer, [("gone", gone), *model.named_parameters()])
    _NAMES[optimizer][id(model.bias)] = _NAMES[optimizer][id(gone)]  # as if it had got the memory
    assert groups_of(optimizer)[0]["param_names"] == ["weight", None]


def test_names_of_the_optimizer_itself_stay():
    model, optimizer = made()
    name_parameters(optimizer, [("other", model.weight)])
    assert groups_of(optimizer)[0]["param_names"] == ["weight", "bias"]


def test_names_stay_with_their_parameters_where_the_file_has_another_order():
    (model, _), (again, _) = made(), made()
    weight, bias = again.named_parameters()
    optimizer = torch.optim.SGD([{"params": [bias]}, {"params": [weight]}], lr=1.0)
    saved = torch.optim.SGD([{"params": [one]} for one in model.named_parameters()], lr=1.0)
    clip_at_step(saved, AdaptiveThreshold(QuantileRule()), scope="layer")
    step(model, saved)
    clip_at_step(optimizer, max_norm := AdaptiveThreshold(QuantileRule()), scope="layer")
    optimizer.load_state_dict(saved.state_dict())
    step(again, optimizer)
    found = dict(zip(max_norm.state_dict()["layers"], max_norm.state_dict()["norms"], strict=True))
    assert found == {"bias, of shape (1,)": [2.0, 2.0], "weight, of shape (1, 2)": [5.0, 5.0]}
