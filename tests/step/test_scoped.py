"""Layers, units, elements and AGC at each step: the weights move by what a call in place leaves of the gradients."""

import math

import pytest
import torch

import gradclip
from gradclip import clip_at_step

CALLS = {
    "layer": lambda p, **k: gradclip.clip_grad_layer_norm_(p, 1.0, **k),
    "unit": lambda p, **k: gradclip.clip_grad_unit_norm_(p, 1.0, **k),
    "value": lambda p, **k: gradclip.clip_grad_value_(p, 1.0, **k),
    "agc": lambda p, **k: gradclip.adaptive_grad_clip_(p, 1.0, **k),
}
EACH = pytest.mark.parametrize("scope", CALLS)


def made(*, fused=None, lr=1.0):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.named_parameters(), lr=lr, fused=fused)


def give(model, scale=3.0):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * scale


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@EACH
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("where", [None, "weight"])
def test_a_step_gets_what_the_call_leaves(scope, fused, where):
    model, optimizer = made(fused=fused)
    give(model)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    norm = gradclip.grad_norm(model.named_parameters(), where=where)
    CALLS[scope](model.named_parameters(), where=where)
    expected = [one - parameter.grad for one, parameter in zip(weights(model), model.parameters(), strict=True)]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    clipping = clip_at_step(optimizer, 1.0, scope=scope, where=where)
    optimizer.step()
    assert all(map(torch.equal, weights(model), expected))
    assert clipping.norm == (None if scope == "value" else pytest.approx(norm.item(), rel=1e-6))
    numbers = clipping.numbers()
    assert (numbers.pop("grad_norm") is clipping.norm) if scope != "value" else numbers == {}
    if scope in ("value", "agc"):
        assert numbers == {}
    else:
        left = gradclip.grad_norm(model.named_parameters(), where=where).item()
        assert numbers.pop("grad_norm_clipped").item() == pytest.approx(left, rel=1e-6)
        assert [*numbers] == ["clipped_share", "skipped_share", f"clipped_{scope}_share"]
    assert repr(clipping) == f"StepClipping(SGD, max_norm=1.0, scope={scope!r}, fused=False, 1 step)"
    clipping.remove()
    give(model)
    before = weights(model)
    optimizer.step()
    moved = [a - p.grad for a, p in zip(before, model.parameters(), strict=True)]
    assert all(map(torch.equal, weights(model), moved))


def test_a_layer_by_hand():
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    clipping = clip_at_step(optimizer, 1.0, scope="layer")
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0])
    optimizer.step()
    assert (first.tolist(), second.tolist()) == (pytest.approx([-0.6, -0.8]), [0.0, pytest.approx(-1.0)])
    assert (clipping.norm, clipping.threshold) == (13.0, 1.0)
    clipping.max_norm = 5.0
    first.grad, second.grad = torch.tensor([3.0, 4.0]), None
    optimizer.step()
    assert first.tolist() == pytest.approx([-3.6, -4.8])
    assert clipping.norm == 5.0


@pytest.mark.parametrize(("scope", "max_norm"), [("layer", 0.1), ("unit", 0.1), ("layer", "adaptive")])
@pytest.mark.parametrize("watched", [False, True])
def test_numbers_are_those_of_the_calls_and_the_monitor(scope, max_norm, watched):
    weight, bias, frozen = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,), (3,)))
    optimizer = torch.optim.SGD([weight, frozen, bias], lr=0.1)
    monitor = gradclip.Monitor()
    rule = gradclip.QuantileRule(factor=1.0, window=4)
    given = gradclip.AdaptiveThreshold(rule) if max_norm == "adaptive" else max_norm
    more = {"monitor": monitor} if watched else {}
    clipping = clip_at_step(optimizer, given, scope=scope, nonfinite="skip", **more)
    steps = [(0.01, 0.01), (0.01, 0.02), (0.5, 0.01), (math.nan, 0.5), (0.5, 0.5), (0.1, 0.02)]
    seen, counted = [], []
    for one, other in steps:
        weight.grad, bias.grad = torch.tensor([[one, 0.0], [0.0, 0.01]]), torch.tensor([0.0, other])
        optimizer.step()
        numbers = {name: number.item() for name, number in clipping.numbers().items()}
        left = [p.grad.norm().item() for p in (weight, bias) if p.grad is not None]
        assert numbers["grad_norm_clipped"] == pytest.approx(math.hypot(*left), rel=1e-6)
        seen.append(numbers[f"clipped_{scope}_share"])
        counted.append((numbers["clipped_share"], numbers["skipped_share"]))
    if watched:
        assert counted[-1] == pytest.approx((monitor.counts.clipped_share, monitor.num_skipped / monitor.steps))
    if max_norm == 0.1:
        shares = {"layer": [0, 0, 1 / 2, 0, 1, 1 / 2], "unit": [0, 0, 1 / 3, 0, 2 / 3, 1 / 3]}[scope]
        assert seen == pytest.approx(shares, rel=1e-6)  # the last 0.1 is above the threshold in float32
        assert counted[3] == pytest.approx((1 / 4, 1 / 4))
    else:
        assert 0.5 in seen


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_skip_skips_the_whole_step(scope, bad):
    model, optimizer = made()
    before = weights(model)
    clipping = clip_at_step(optimizer, 1.0, scope=scope, nonfinite="skip")
    give(model)
    model.bias.grad[0] = bad
    optimizer.step()
    assert all(map(torch.equal, weights(model), before))
    assert model.weight.grad is None
    assert clipping.steps == 1
    give(model)
    optimizer.step()
    assert not torch.equal(model.weight, before[0])


@pytest.mark.after_error
@pytest.mark.parametrize("scope", ["layer", "unit", "agc"])
def test_raise_names_the_gradient(scope):
    model, optimizer = made()
    before = weights(model)
    clipping = clip_at_step(optimizer, 1.0, scope=scope, nonfinite="raise")
    give(model)
    model.bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError, match="bias"):
        optimizer.step()
    assert (clipping.steps, clipping.norm, clipping.threshold) == (0, None, None)
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.parametrize("scope", ["layer", "unit", "agc"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_the_norm_counts_a_parameter_listed_twice_once(scope):
    weight, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight, weight, bias], lr=1.0)
    clipping = clip_at_step(optimizer, 1.0, scope=scope)
    weight.grad, bias.grad = torch.full((2, 2), 1.5), torch.tensor([0.0, 4.0])
    optimizer.step()
    assert clipping.norm == pytest.approx(5.0)


def test_the_norm_of_many_units_is_exact():
    weight = torch.nn.Parameter(torch.zeros(2_000_000, 2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    clipping = clip_at_step(optimizer, 1.0, scope="unit")
    weight.grad = torch.linspace(0.5, 0.9, 4_000_000).reshape(-1, 2)
    expected = gradclip.grad_norm([weight]).item()
    optimizer.step()
    assert clipping.norm.item() == pytest.approx(expected, rel=1e-6)


def test_eps_is_the_lower_limit_of_agc():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clip_at_step(optimizer, 0.5, scope="agc", eps=2.0)
    weight.grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


@pytest.mark.after_error
@pytest.mark.parametrize("scope", CALLS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": gradclip.AdaptiveThreshold()}, "got an AdaptiveThreshold. Pass a number, or scope='layer' or"),
        ({"max_norm": {"*": 1.0}}, "takes one number as max_norm, got patterns of names"),
        ({"fused": True}, "a fused step divides all gradients by one number"),
        ({"max_norm": -1.0}, "max_norm must not be negative"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(scope, settings, message):
    if scope == "layer" and "an AdaptiveThreshold" in message:  # a layer has a norm to follow
        settings = {"max_norm": gradclip.AdaptiveThreshold(skip_above=4.0)}
        message = "skip_above skips a step by the norm of all gradients"
    _, optimizer = made(fused=True)
    with pytest.raises(ValueError, match=message):
        clip_at_step(optimizer, **{"max_norm": 1.0, "scope": scope, **settings})
    assert not optimizer._optimizer_step_pre_hooks
    clipping = clip_at_step(optimizer, 1.0, scope=scope)
    if "max_norm" in settings:
        with pytest.raises(ValueError, match=message):
            clipping.max_norm = settings["max_norm"]
    assert clipping.max_norm == 1.0


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "row"}, "scope must be one of 'global', 'layer', 'unit', 'value', 'agc', got 'row'"),
        ({"scope": "layer", "eps": 1e-3}, "which only scope='agc' measures"),
        ({"scope": "agc", "eps": -1.0}, "eps must not be negative"),
        ({"scope": "layer", "unit_axis": 0}, "which only scope='unit' and scope='agc' clip, got scope='layer'"),
        ({"unit_axis": 0}, "got scope='global'. Leave unit_axis out"),
        ({"scope": "unit", "unit_axis": 2}, "unit_axis is 2, but "),
        ({"scope": "value", "monitor": gradclip.Monitor()}, "measures none. Leave monitor out"),
        ({"scope": "value", "nonfinite": "zero"}, "scope='value' leaves NaN as it is"),
        ({"scope": "value", "nonfinite": "raise"}, "scope='value' leaves NaN as it is"),
        ({"scope": "value", "process_group": []}, "needs no other process"),
    ],
)
def test_settings_are_checked_at_once(settings, message):
    _, optimizer = made()
    with pytest.raises(ValueError, match=message):
        clip_at_step(optimizer, 1.0, **settings)
    assert not optimizer._optimizer_step_pre_hooks


@EACH
def test_thresholds_of_groups_are_refused(scope):
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))], "max_norm": 1.0}], lr=1.0)
    with pytest.raises(ValueError, match="a parameter group has 'max_norm'"):
        clip_at_step(optimizer, 1.0, scope=scope)


@EACH
def test_a_guard_expects_no_bound_of_all_gradients(scope):
    model, optimizer = made()
    with clip_at_step(optimizer, 1.0, scope=scope) as clipping, gradclip.guard(optimizer, clipping) as watched:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(4, 3)) ** 2).sum().backward()
            optimizer.step()
        assert watched.reports == []


@EACH
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler(scope, overflow):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = made()
    before = weights(model)
    clipping = clip_at_step(optimizer, 1.0, scope=scope)
    scaler.scale(model(torch.full((4, 3), math.inf if overflow else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before[0]) is overflow
    assert clipping.steps == (0 if overflow else 1)


@EACH
def test_a_closure(scope):
    model, optimizer = made()
    clipping = clip_at_step(optimizer, 1.0, scope=scope)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        return loss

    before = weights(model)[1]
    optimizer.step(closure)
    assert clipping.steps == 1
    assert (before - model.bias).abs().max() <= 1.0 + 1e-6


@pytest.mark.parametrize("scope", ["layer", "unit", "agc"])
def test_a_monitor_records_what_the_call_in_place_records(scope):
    model, optimizer = made()
    ours, theirs = gradclip.Monitor(layers_every=1), gradclip.Monitor(layers_every=1)
    clipping = clip_at_step(optimizer, 1.0, scope=scope, monitor=ours)
    for scale in (3.0, 0.01):
        give(model, scale)
        CALLS[scope](model.named_parameters(), monitor=theirs)
        give(model, scale)
        optimizer.step()
    assert [(s.norm, s.max_norm) for s in ours.records] == [(s.norm, s.max_norm) for s in theirs.records]
    assert [step.clipped for step in ours.records] == [True, False]
    assert ours.layers.names == theirs.layers.names == ("weight", "bias")
    assert ours.layers.norms.tolist() == theirs.layers.norms.tolist()
    with pytest.raises(ValueError, match="already follows another optimizer"):
        clip_at_step(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), 1.0, scope=scope, monitor=ours)
    clipping.remove()


@pytest.mark.parametrize("scope", ["layer", "unit", "agc"])
def test_a_monitor_counts_a_skipped_step_and_names_its_layer(scope):
    model, optimizer = made()
    monitor = gradclip.Monitor()
    clip_at_step(optimizer, 1.0, scope=scope, nonfinite="skip", monitor=monitor)
    for bad in (1.0, 2.0, 3.0, math.nan):
        give(model)
        model.bias.grad[0] = bad
        optimizer.step()
    assert (monitor.steps, monitor.num_clipped, monitor.num_skipped, monitor.num_nonfinite) == (4, 3, 1, 1)
    (spike,) = monitor.spikes
    assert spike.layers[0].name == "bias"


@pytest.mark.parametrize("scope", ["unit", "agc"])
def test_units_along_another_axis(scope):
    model, optimizer = made()
    give(model)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    CALLS[scope](model.parameters(), unit_axis=1)
    expected = [one - parameter.grad for one, parameter in zip(weights(model), model.parameters(), strict=True)]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    clip_at_step(optimizer, 1.0, scope=scope, unit_axis=1)
    optimizer.step()
    assert all(map(torch.equal, weights(model), expected))


@pytest.mark.parametrize("scope", ["value", "agc"])
def test_a_threshold_of_a_group_added_later_is_refused_at_the_step(scope):
    model, optimizer = made()
    clip_at_step(optimizer, 1.0, scope=scope)
    added = torch.nn.Parameter(torch.ones(2, 2))
    added.grad = torch.ones(2, 2)
    optimizer.add_param_group({"params": {"added": added}.items(), "max_norm": 0.5})
    give(model)
    before = weights(model)
    with pytest.raises(ValueError, match=f"does not read with scope='{scope}'. Leave it out, or make an optimizer for"):
        optimizer.step()
    assert all(map(torch.equal, weights(model), before))
