"""Correct loops with unusual gradients or networks: a guard says nothing."""

import copy
import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.nn.utils import clip_grad_value_ as torch_clip_value

import gradclip
from loops import CLIPS, STEPS, descent, loss_of, network, own_clip, trained


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=CLIPS)
def clip(request):
    return CLIPS[request.param]


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
