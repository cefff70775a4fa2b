"""Correct loops, of many kinds: a guard says nothing."""

import copy
import math
import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.nn.utils import clip_grad_value_ as torch_clip_value

import gradclip
from gradclip.integrations.torch import clip_in_backward, fold_into
from loops import CLIPS, descent, loss_of, network, own_clip

STEPS = 9


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=CLIPS)
def clip(request):
    return CLIPS[request.param]


def trained(optimizer, once, max_norm=1.0, steps=STEPS, looks=4, **settings):
    """Take steps with a guard that looks at the first two, and at each of a multiple of 4; it must say nothing."""
    watched = gradclip.guard(optimizer, max_norm, every=4, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(steps):
            once()
    watched.remove()
    assert (watched.reports, watched.looks) == ([], looks), watched
    return watched


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain(clip, dtype, set_to_none):
    model = network(dtype)
    optimizer = descent(model)

    def once():
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    assert trained(optimizer, once).norm == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("max_norm", [1.0, 1e9, math.inf, None])
def test_any_threshold(clip, max_norm):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), math.inf if max_norm is None else max_norm)
        optimizer.step()

    trained(optimizer, once, max_norm)


def test_a_loop_that_measures_after_the_step_too(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        clip(model.parameters(), math.inf)

    trained(optimizer, once)


@pytest.mark.parametrize("zero", ["before", "after", "with zeros"])
def test_accumulation(clip, zero):
    model = network()
    optimizer = descent(model)

    def once():
        if zero != "after":
            optimizer.zero_grad(set_to_none=zero == "before")
        for _ in range(4):
            (loss_of(model) / 4).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()

    trained(optimizer, once)


def test_a_running_mean_of_micro_batches(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        for before in range(4):
            for one in model.parameters():
                if one.grad is not None:
                    one.grad.mul_(before / (before + 1))
            (loss_of(model) / (before + 1)).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_tasks_clipped_one_by_one_then_added(clip):
    model = network()
    optimizer = descent(model)

    def once():
        total = [torch.zeros_like(one) for one in model.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            clip(model.parameters(), 1.0)
            for into, one in zip(total, model.parameters(), strict=True):
                into += one.grad / 3
        for into, one in zip(total, model.parameters(), strict=True):
            one.grad = into
        optimizer.step()

    trained(optimizer, once)


def test_two_passes_for_one_step(clip):
    """As sharpness-aware minimization does: the first pass moves the parameters, the second gives the gradients."""
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        moves = [0.01 * one.grad for one in model.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.add_(move, alpha=sign)
            if sign == 1:
                optimizer.zero_grad()
                loss_of(model).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_closure(clip, make):
    model = network()
    optimizer = make(model.parameters(), lr=1e-4)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        clip(model.parameters(), 1.0)
        return loss

    trained(optimizer, lambda: optimizer.step(closure))


@pytest.mark.parametrize("fused", [False, True])
def test_scaler(clip, fused):
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    assert trained(optimizer, once).norm == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_with_the_threshold_scaled_too(clip, fused):
    model = network()
    optimizer = descent(model, make=torch.optim.SGD, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        clip(model.parameters(), scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()

    assert trained(optimizer, once).norm == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_that_skips_now_and_then(clip, fused):
    model = network()
    optimizer = descent(model, make=torch.optim.SGD, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    broken = [turn in (0, 1, 2, 9, 10, 18) for turn in range(30)]  # at its start a scale is often too large
    left = list(broken)

    def once():
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * (math.inf if left.pop(0) else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    watched = trained(optimizer, once, 1.0, 30, looks=9 if fused else 8)
    assert watched.steps == 30 - (not fused) * sum(broken)
    assert watched.skipped == 3  # those at the start do not count


def test_the_first_steps_that_a_scaler_skips_do_not_count():
    model = network()
    optimizer = descent(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    watched = gradclip.guard(optimizer, 1.0, stop_after=2, on_mistake="raise")
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, scale=1e10)).backward()
        scaler.unscale_(optimizer)
        gradclip.clip_grad_norm_(model.parameters(), 1e-3 * math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert watched.steps < 38
    watched.remove()


@pytest.mark.parametrize("first", ["guard", "fold_into"])
@pytest.mark.parametrize("max_norm", [1.0, gradclip.AdaptiveNorm, "handle"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fold_into(first, max_norm, scaled):
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    adaptive = gradclip.AdaptiveNorm() if max_norm is gradclip.AdaptiveNorm else 1.0
    if first == "guard" and max_norm != "handle":
        watched = gradclip.guard(optimizer, adaptive, every=4)
        handle = fold_into(optimizer, adaptive)
    else:
        handle = fold_into(optimizer, adaptive)
        watched = gradclip.guard(optimizer, handle if max_norm == "handle" else adaptive, every=4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    watched.remove()
    assert watched.reports == []
    assert watched.norm <= (1.0001 if adaptive == 1.0 else handle.norm * 1.0001)
    assert handle.norm > 2.0


def test_adaptive_norm(clip):
    if clip is not gradclip.clip_grad_norm_:
        return
    model, max_norm = network(), gradclip.AdaptiveNorm()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), max_norm)
        optimizer.step()

    trained(optimizer, once, max_norm, 30, looks=9)
    assert max_norm.clipped > 0


@pytest.mark.parametrize("first", ["guard", "clip_in_backward"])
@pytest.mark.parametrize("times", [1, 3])
def test_clip_in_backward(first, times):
    model = network()
    optimizer = descent(model)
    if first == "guard":
        watched = gradclip.guard(optimizer, 1.0, every=4)
        clip_in_backward(model, 1.0)
    else:
        clip_in_backward(model, 1.0)
        watched = gradclip.guard(optimizer, 1.0, every=4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(times):
            loss_of(model).backward()
        optimizer.step()
    watched.remove()
    assert (watched.reports, watched.looks) == ([], 4)


def test_two_optimizers_of_one_loss(clip):
    model = network()
    one, other = (torch.optim.SGD(model[i].parameters(), lr=1e-4) for i in (0, 2))
    rest = torch.optim.Adam(model[4].parameters(), lr=1e-4)
    guards = [gradclip.guard(each, 1.0, every=4, on_mistake="raise") for each in (one, other, rest)]
    for _ in range(STEPS):
        for each in (one, other, rest):
            each.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        for each in (one, other, rest):
            each.step()
    assert [watched.looks for watched in guards] == [4, 4, 4]
    for watched in guards:
        watched.remove()


def test_a_call_for_each_group(clip):
    model = network()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], lr=1e-4)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        for group in optimizer.param_groups:
            clip(group["params"], 0.5)
        optimizer.step()

    trained(optimizer, once)


def test_frozen_layers(clip):
    model = network()
    for one in model[2].parameters():
        one.requires_grad_(False)
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip([one for one in model.parameters() if one.requires_grad], 1.0)
        optimizer.step()

    trained(optimizer, once)


@pytest.mark.parametrize(
    ("way", "max_norm"),
    [
        (lambda ps: gradclip.clip_grad_layer_norm_(ps, 1.0), 1.0),
        (lambda ps: gradclip.clip_grad_unit_norm_(ps, 1.0), 1.0),
        (lambda ps: gradclip.clip_grad_value_(ps, 0.5), 0.5),
        (lambda ps: gradclip.adaptive_grad_clip_(ps), 1.0),
        (lambda ps: gradclip.adaptive_grad_clip_(ps), None),
        (lambda ps: torch_clip_value(ps, 0.5), 0.5),
        (lambda ps: torch_clip_value(ps, 0.5), None),
        (lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.25), 0.5),
        (lambda ps: [torch_clip([one], 1.0) for one in ps], 1.0),
        (lambda ps: [own_clip([one], 1.0) for one in ps], 1.0),
        (lambda ps: [one.grad.clamp_(-0.5, 0.5) for one in ps], 0.5),
    ],
    ids=[
        "layers",
        "units",
        "values",
        "AGC",
        "AGC, no bound",
        "torch's values",
        "torch's values, no bound",
        "torch's smaller values",
        "torch's, one by one",
        "own, one by one",
        "clamp_",
    ],
)
def test_ways_that_do_not_clip_by_the_global_norm(way, max_norm):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        way(list(model.parameters()))
        optimizer.step()

    trained(optimizer, once, max_norm)


@pytest.mark.parametrize("order", [1, math.inf])
def test_norms_of_other_orders(order):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        gradclip.clip_grad_norm_(model.parameters(), 1.0, order)
        optimizer.step()

    assert trained(optimizer, once, ord=order).norm == pytest.approx(1.0, rel=1e-4)


def test_sparse_gradients():
    table = torch.nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-4)

    def once():
        optimizer.zero_grad()
        (table(torch.randint(20, (8,))) * 30).square().sum().backward()
        gradclip.clip_grad_norm_(table.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_networks_in_turn(clip, set_to_none):
    """As in a GAN: the backward pass of one goes through the other, too."""
    maker, judge = network(), torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    of_maker, of_judge = descent(maker, 1e-3, torch.optim.Adam), descent(judge, 1e-3, torch.optim.Adam)
    guards = [gradclip.guard(each, 0.01, every=4, on_mistake="raise") for each in (of_maker, of_judge)]
    for _ in range(STEPS):
        of_judge.zero_grad(set_to_none=set_to_none)
        fake = maker(torch.randn(16, 4))
        judge(torch.randn(16, 1)).mean().backward()
        (-judge(fake.detach()).mean()).backward()
        clip(judge.parameters(), 0.01)
        of_judge.step()
        of_maker.zero_grad(set_to_none=set_to_none)
        judge(fake).mean().backward()
        clip(maker.parameters(), 0.01)
        of_maker.step()
    for watched in guards:
        watched.remove()
        assert watched.looks == 4


def test_one_network_more_often_than_the_other(clip):
    model, other = network(), network()
    one, two = descent(model), descent(other)
    guards = [gradclip.guard(each, 1.0, every=4, on_mistake="raise") for each in (one, two)]
    for step in range(3 * STEPS):
        for net, optimizer in ((model, one), (other, two)) if step % 3 == 2 else ((model, one),):
            optimizer.zero_grad()
            loss_of(net).backward()
            clip(net.parameters(), 1.0)
            optimizer.step()
    assert [watched.looks for watched in guards] == [8, 4]
    for watched in guards:
        watched.remove()


def test_evaluation_and_derivatives_between(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(model.parameters(), 1.0)
        torch.autograd.grad(loss_of(model), list(model.parameters()))  # accumulates nothing
        optimizer.step()
        with torch.no_grad():
            loss_of(model)
        torch.autograd.grad(loss_of(model), list(model.parameters()))

    trained(optimizer, once)


def test_a_penalty_on_the_gradient(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        grads = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
        (loss_of(model) + 1e-3 * sum(grad.square().sum() for grad in grads)).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_checkpointed_layers(clip):
    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        x = torch.randn(16, 4, requires_grad=True)
        for part in (model[:2], model[2:4]):
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
        (model[4](x) * 30).square().mean().backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_layers_that_are_used_now_and_then(clip):
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(5))
    optimizer = descent(layers)
    turns = iter(range(1000))

    def once():
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(layers[next(turns) % 5]).backward()
        clip(layers.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_gradients_set_by_hand():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def once():
        weight.grad = torch.tensor([3.0, 4.0, 0.0])
        gradclip.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_no_gradients_at_all():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    assert trained(optimizer, optimizer.step).norm == 0.0


def test_parameters_added_later(clip):
    model, more = network(), torch.nn.Linear(4, 1)
    optimizer = descent(model)
    turns = iter(range(1000))

    def once():
        if next(turns) == 3:
            optimizer.add_param_group({"params": more.parameters()})
        optimizer.zero_grad()
        (loss_of(model) + loss_of(more)).backward()
        clip([one for group in optimizer.param_groups for one in group["params"]], 1.0)
        optimizer.step()

    trained(optimizer, once)


def test_copies_and_files_of_what_is_watched(tmp_path, clip):
    model = network()
    optimizer = descent(model, make=torch.optim.AdamW)
    ema = []

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        ema.append(copy.deepcopy(model))
        torch.save([model, optimizer.state_dict()], tmp_path / "model.pt")
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)
    loss_of(ema[0]).backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models():
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of_compiled = (compiled(torch.ones(16, 4)) * 30).square().mean()
        loss_of_compiled.backward()
        gradclip.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained(optimizer, once)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= before + 1


def test_calls_for_trees_of_arrays(clip):
    import numpy as np

    model = network()
    optimizer = descent(model)

    def once():
        optimizer.zero_grad()
        loss_of(model).backward()
        gradclip.clip_grad_norm_({"w": np.ones(3)}, 1.0)
        clip(model.parameters(), 1.0)
        optimizer.step()

    trained(optimizer, once)
