"""Steps clip what they change, with whatever else is attached to the optimizer."""

import copy
import functools
import math
import pickle

import pytest
import torch

import gradclip
import gradclip._src.step.update as update
from gradclip import clip_at_step, clip_update_at_step
from updated import moved, parameters, steps, values

OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
DTYPES = [torch.bfloat16, torch.float32]
WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def same(one, other):
    """Say whether two optimizers have the same parameters and state, bit by bit."""
    flat = [torch.utils._pytree.tree_leaves((values(each), each.state_dict())) for each in (one, other)]
    pairs = zip(*flat, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.fixture
def one_by_one(monkeypatch):
    """Copy one parameter at a time."""
    monkeypatch.setattr(update, "_COPIED_AT_ONCE", 1)


class Subclass(torch.optim.AdamW):
    """Could do anything in its step, so that all parameters are copied."""

    def step(self, closure=None):
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_sub_(group["params"], 2.0)
        return found


class WithClosure(torch.optim.Optimizer):
    """Not of PyTorch, so that all parameters are copied."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        if closure is not None:
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    one -= group["lr"] * one.grad


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_the_same_where_nothing_is_clipped(name, one_by_one):
    if not hasattr(torch.optim, name):
        return  # this PyTorch has no such optimizer
    made = [getattr(torch.optim, name)(parameters(), lr=0.01, **OPTIMIZERS[name]) for _ in range(2)]
    clipping = clip_update_at_step(made[0], math.inf)
    for optimizer in made:
        steps(optimizer, sparse=name == "SparseAdam")
    assert same(*made)
    assert clipping.steps == 3
    bounded = getattr(torch.optim, name)(parameters(), lr=0.01, **OPTIMIZERS[name])
    clip_update_at_step(bounded, 0.01)
    before = values(bounded)
    steps(bounded, 1.0, sparse=name == "SparseAdam")
    assert 0 < max(moved(bounded, before)) < 0.011


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_takes_one_epsilon_for_several_dtypes(foreach, one_by_one):
    made = []
    for _ in range(2):
        some = [torch.nn.Parameter(one.detach().to(dtype)) for one, dtype in zip(parameters(2), DTYPES, strict=True)]
        made.append(torch.optim.Adafactor(some, lr=0.01, foreach=foreach))
    clip_update_at_step(made[0], math.inf)
    for optimizer in made:
        for one in optimizer.param_groups[0]["params"]:
            one.grad = torch.full_like(one, 1e-4)
        optimizer.step()
    assert same(*made)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_spike_moves_each_parameter_by_the_bound_alone(way, one_by_one):
    optimizer = torch.optim.AdamW(parameters(), lr=0.01, betas=(0.5, 0.999), **way)
    clipping = clip_update_at_step(optimizer)
    steps(optimizer, *[1e-4] * 40)
    before = values(optimizer)
    steps(optimizer, 1.0)
    assert clipping.rms > 2.0
    assert moved(optimizer, before) == pytest.approx([1.0] * 4, rel=1e-4)
    assert clipping.numbers().keys() == {"update_rms", "update_clipped_share"}
    assert 0.0 < clipping.numbers()["update_clipped_share"] < 1.0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_parts_give_what_one_copy_of_all_gives(way, monkeypatch):
    made = [torch.optim.Adam(parameters(), lr=0.01, **way) for _ in range(3)]
    for optimizer, at_once in zip(made, (1, 50, None), strict=True):
        monkeypatch.setattr(update, "_COPIED_AT_ONCE", at_once)
        monkeypatch.setattr(update, "_BY_PARAMETER", {torch.optim.Adam} if at_once else set())
        clip_update_at_step(optimizer, 0.5)
        steps(optimizer)
    assert same(made[0], made[1])
    assert same(made[0], made[2])


def test_the_state_is_that_of_an_unclipped_step_and_gets_nothing_more():
    one, other = (torch.optim.AdamW(parameters(), lr=0.01) for _ in range(2))
    clip_update_at_step(one, 0.1)
    for optimizer in (one, other):
        steps(optimizer)
    assert str(one.state_dict()) == str(other.state_dict())
    again = torch.optim.AdamW(parameters(), lr=0.01)
    clip_update_at_step(again, 0.1)
    again.load_state_dict(copy.deepcopy(one.state_dict()))
    with torch.no_grad():
        for mine, theirs in zip(again.param_groups[0]["params"], values(one), strict=True):
            mine.copy_(theirs)
    for optimizer in (one, again):
        steps(optimizer)
    assert same(one, again)


@pytest.mark.parametrize("first", ["gradients", "updates"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_are_clipped_before_the_step_whichever_was_attached_first(first, way, one_by_one):
    optimizer = torch.optim.SGD(parameters(), lr=1.0, **way)
    calls = [lambda: clip_at_step(optimizer, 1.0), lambda: clip_update_at_step(optimizer, 0.01)]
    handles = [call() for call in (calls if first == "gradients" else calls[::-1])]
    by_gradient, by_update = handles if first == "gradients" else handles[::-1]
    for _ in range(3):
        before = values(optimizer)
        steps(optimizer, 10.0)
        assert by_gradient.norm > 1.0
        largest = max(one.grad.norm() for one in optimizer.param_groups[0]["params"]) / 6**0.5
        assert by_update.rms.item() == pytest.approx(largest.item(), rel=1e-4)
        assert moved(optimizer, before) == pytest.approx([0.01] * 4, rel=1e-4)


def test_a_hook_that_comes_later_still_changes_the_gradients(one_by_one):
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    clip_update_at_step(optimizer)
    optimizer.register_step_pre_hook(
        lambda *_: [one.grad.zero_() for one in optimizer.param_groups[0]["params"]] and None
    )
    before = values(optimizer)
    for _ in range(3):
        steps(optimizer, 1.0)
        assert moved(optimizer, before) == [0.0] * 4


def test_other_hooks_see_the_groups_and_gradients_as_they_are(one_by_one):
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    seen = []
    optimizer.register_step_post_hook(lambda given, *_: seen.append(given.param_groups))
    clip_update_at_step(optimizer)
    groups = optimizer.param_groups
    steps(optimizer, 1.0)
    assert seen[0] is groups is optimizer.param_groups
    assert len(groups[0]["params"]) == 4


@pytest.mark.parametrize("kind", [torch.optim.SGD, Subclass])
def test_hooks_after_the_step_see_what_is_stored_whenever_they_were_registered(kind):
    optimizer, seen = kind(parameters(), lr=0.1), []
    optimizer.register_step_post_hook(lambda given, *_: seen.append(values(given)))
    clip_update_at_step(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda given, *_: seen.append(values(given)))
    steps(optimizer, 1.0)
    for found in seen[-2:]:
        assert all(map(torch.equal, found, values(optimizer)))


def test_frozen_and_empty_parameters_with_a_gradient_step_as_before(one_by_one):
    made = []
    for _ in range(2):
        some = [*parameters(2), torch.nn.Parameter(torch.zeros(0))]
        made.append(torch.optim.Adam(some, lr=0.1))
        some[0].requires_grad_(False)
    clip_update_at_step(made[0], math.inf)
    for optimizer in made:
        steps(optimizer)
    assert len(made[0].state) == 3
    assert same(*made)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Subclass])
def test_a_closure_is_called_once_and_its_gradients_count(kind, one_by_one):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = kind([weight], lr=0.5)
    clip_at_step(optimizer, 100.0)
    clipping = clip_update_at_step(optimizer, 0.1)
    calls = []

    def closure():
        calls.append(1)
        weight.grad = torch.tensor([3.0, 4.0])
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7.0
    assert (len(calls), clipping.steps) == (1, 1)
    assert weight.detach().pow(2).mean().sqrt() == pytest.approx(0.05)


def test_a_step_of_a_subclass_is_measured_once_and_whole():
    optimizer = Subclass(parameters(), lr=0.1)
    clipping = clip_update_at_step(optimizer)
    before = values(optimizer)
    steps(optimizer, 1.0)
    assert clipping.steps == 1
    assert clipping.rms > 15.0
    assert moved(optimizer, before) == pytest.approx([1.0] * 4, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_moves_nothing(fused, one_by_one):
    optimizer = torch.optim.Adam(parameters(), lr=1.0, fused=fused)
    clipping = clip_update_at_step(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for factor in (math.inf, 1.0):
        before = values(optimizer)
        optimizer.zero_grad()
        scaler.scale(sum((one * factor).sum() for one in optimizer.param_groups[0]["params"])).backward()
        scaler.step(optimizer)
        scaler.update()
        assert moved(optimizer, before) == pytest.approx([0.0 if factor > 1.0 else 0.5] * 4)
    assert scaler.get_scale() == 32.0
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert clipping.rms == pytest.approx(1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_scaler_sets_for_one_step_does_not_stay(fused, one_by_one):
    made = [torch.optim.SGD(parameters(), lr=0.5, momentum=0.9, fused=fused) for _ in range(2)]
    clip_update_at_step(made[0], math.inf)
    for optimizer in made:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(sum(one.sum() for one in optimizer.param_groups[0]["params"])).backward()
        scaler.step(optimizer)
        steps(optimizer)
    assert same(*made)


class Warns(torch.optim.SGD):
    """Notes in its step that it has warned."""

    @torch.no_grad()
    def step(self, closure=None):
        if not getattr(self, "has_warned", False):
            self.has_warned, self.count = True, getattr(self, "count", 0) + 1
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(group["lr"])


def test_what_the_step_notes_stays(monkeypatch, one_by_one):
    optimizer = Warns(parameters(), lr=0.5)
    monkeypatch.setattr(update, "_BY_PARAMETER", {Warns})
    clip_update_at_step(optimizer)
    steps(optimizer)
    assert (optimizer.has_warned, optimizer.count) == (True, 1)


@pytest.mark.parametrize("wraps", [functools.wraps(torch.optim.SGD.step), lambda step: step], ids=["wraps", "plain"])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_somebody_has_patched_is_clipped_once(wraps, early, monkeypatch, one_by_one):
    plain = torch.optim.SGD.step
    optimizer = None if early else torch.optim.SGD(parameters(), lr=0.1)
    monkeypatch.setattr(torch.optim.SGD, "step", wraps(lambda *given, **named: plain(*given, **named)))
    optimizer = optimizer or torch.optim.SGD(parameters(), lr=0.1)
    clipping = clip_update_at_step(optimizer)
    before = values(optimizer)
    steps(optimizer, 30.0)
    assert clipping.steps == 1
    assert moved(optimizer, before) == pytest.approx([1.0] * 4, rel=1e-4)


def test_learning_rates_are_those_of_the_step_and_of_the_group(one_by_one):
    first, second, later = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = [{"params": [first]}, {"params": [second], "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.SGD(groups, lr=2.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    clipping = clip_update_at_step(optimizer, 1.0)
    optimizer.add_param_group({"params": [later], "lr": 0.0})
    for factor in (1.0, 0.5):
        before = values(optimizer)
        for one in (first, second, later):
            one.grad = torch.full((2,), 8.0)
        optimizer.step()
        changes = [(old - new)[0].item() for new, old in zip(values(optimizer), before, strict=True)]
        assert changes == pytest.approx([2.0 * factor, 0.25 * factor, 0.0])
        schedule.step()
    assert clipping.rms.item() == pytest.approx(8.0)


def test_maximize_missing_gradients_frozen_and_empty_parameters_and_nan(one_by_one):
    up, idle, frozen, empty, bad = (torch.nn.Parameter(torch.zeros(n)) for n in (2, 2, 2, 0, 2))
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([up, idle, frozen, empty, bad], lr=0.5, maximize=True)
    clipping = clip_update_at_step(optimizer, 1.0)
    up.grad, empty.grad, bad.grad = torch.full((2,), 8.0), torch.zeros(0), torch.tensor([math.nan, 8.0])
    optimizer.step()
    assert up.tolist() == pytest.approx([0.5, 0.5])
    assert (idle.tolist(), frozen.tolist()) == ([0.0, 0.0], [0.0, 0.0])
    assert (bad[0].isnan().item(), bad[1].item()) == (True, 4.0)
    assert clipping.rms.isnan()
    up.grad = bad.grad = None
    optimizer.step()
    assert clipping.rms == 0.0
    assert clipping.steps == 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", [torch.optim.SGD, Subclass])
def test_a_compiled_step_clips(kind):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = kind([weight], lr=1.0)
    torch.compiler.reset()
    clipping = clip_update_at_step(optimizer, 0.5)
    step = torch.compile(optimizer.step, backend="eager")
    for scale in range(1, 12):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.tensor([3.0, 4.0]) * scale
        step()
        assert weight.detach().pow(2).mean().sqrt() == pytest.approx(0.5)
    assert clipping.steps == 11


def test_an_error_in_a_step_leaves_nothing_behind(one_by_one):
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    clipping = clip_update_at_step(optimizer)
    steps(optimizer, 1.0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    before = values(optimizer)
    steps(optimizer, 1.0)
    assert clipping.steps == 2
    assert max(moved(optimizer, before)) <= 1.0 + 1e-5


def test_the_handle_ends_changes_and_is_not_copied():
    optimizer = torch.optim.SGD(parameters(1), lr=1.0)
    with clip_update_at_step(optimizer, 0.5) as clipping:
        assert (repr(clipping), clipping.numbers()) == ("UpdateClipping(SGD, max_rms=0.5, 0 steps)", {})
        with pytest.raises(ValueError, match="clip_update_at_step was already called"):
            clip_update_at_step(optimizer)
        clipping.max_rms = 0.125
        before = values(optimizer)
        steps(optimizer, 30.0)
        assert moved(optimizer, before) == pytest.approx([0.125], rel=1e-4)
        with pytest.raises(ValueError, match="max_rms must not be negative"):
            clipping.max_rms = -1.0
        with pytest.raises(TypeError, match="a UpdateClipping cannot be copied"):
            pickle.dumps(clipping)
    assert repr(clipping) == "UpdateClipping(SGD, max_rms=0.125, 1 step, removed)"
    before = values(optimizer)
    steps(optimizer, 30.0)
    assert max(moved(optimizer, before)) > 1.0
    clipping.remove()
    clip_update_at_step(optimizer)
    alike = copy.deepcopy(optimizer)
    before = values(alike)
    steps(alike, 30.0)
    assert max(moved(alike, before)) > 1.0


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


class ScheduleFree(torch.optim.SGD):
    def eval(self):
        """Put the averages in place of the parameters."""


def flat():
    found = torch.nn.Parameter(torch.zeros(2))
    found._fsdp_flattened = True
    return [found]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: torch.optim.LBFGS(parameters()), TypeError, "LBFGS keeps in its state"),
        (lambda: torch.optim.ASGD(parameters()), TypeError, "ASGD keeps in its state"),
        (lambda: ScheduleFree(parameters()), TypeError, "ScheduleFree keeps in its state"),
        (lambda: WithoutRate(parameters()), ValueError, "no 'lr'"),
        (lambda: WithoutRate([{"params": parameters(), "lr": None}]), ValueError, "no 'lr'"),
        (lambda: torch.optim.SGD(parameters(), differentiable=True), ValueError, "differentiable=True"),
        (lambda: torch.optim.SGD(flat(), lr=1.0), ValueError, "shards of FullyShardedDataParallel"),
        (lambda: torch.nn.Linear(1, 1), TypeError, "optimizer must be an optimizer of torch.optim"),
    ],
)
def test_what_cannot_be_bounded_is_refused_by_name(make, error, match):
    with pytest.raises(error, match=match):
        clip_update_at_step(make())


def test_a_learning_rate_that_is_no_rate_is_refused_before_the_step(one_by_one):
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    clip_update_at_step(optimizer)
    before = values(optimizer)
    for rate in (-1.0, math.nan):
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(ValueError, match="lr must not be negative or NaN"):
            steps(optimizer, 1.0)
        assert all(map(torch.equal, values(optimizer), before))
    with pytest.raises(ValueError, match="max_rms must not be negative"):
        clip_update_at_step(torch.optim.SGD(parameters()), -1.0)
    with pytest.raises(TypeError, match="max_rms"):
        clip_update_at_step(torch.optim.SGD(parameters()), gradclip.AdaptiveThreshold())


@pytest.mark.parametrize("groups", [1, 2])
def test_memory_that_several_parameters_have_moves_by_the_bound_once(groups, one_by_one):
    memory = torch.zeros(4)
    tied = [torch.nn.Parameter(memory) for _ in range(2)]
    optimizer = torch.optim.SGD(tied if groups == 1 else [{"params": [one]} for one in tied], lr=0.1)
    clip_update_at_step(optimizer)
    for one in tied:
        one.grad = torch.full_like(one, 5.0)
    optimizer.step()
    assert memory.tolist() == pytest.approx([-0.1] * 4)


@pytest.mark.parametrize(("kind", "moves"), [(WithClosure, -0.1), (torch.optim.SGD, -0.2)])
def test_a_closure_may_step_the_same_optimizer(kind, moves):
    (one,) = parameters(1)
    optimizer = kind([one], lr=0.1)
    clipping, before = clip_update_at_step(optimizer), one.detach().clone()

    def closure():
        for size in (5.0, 70.0):
            one.grad = torch.full_like(one, size)
            if size < 70.0:
                optimizer.step()
        return one.sum()

    optimizer.step(closure)
    assert (one - before).flatten().tolist() == pytest.approx([moves] * 6, rel=1e-5)
    assert clipping.steps == 2


@pytest.mark.filterwarnings("error::gradclip.ClippingWarning")
@pytest.mark.parametrize("first", ["guard", "updates"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_guard_sees_what_the_step_gets(first, way, one_by_one):
    optimizer = torch.optim.AdamW(parameters(), lr=0.1, **way)
    calls = [lambda: gradclip.guard(optimizer, 1.0), lambda: clip_update_at_step(optimizer, 0.5)]
    handles = [call() for call in (calls if first == "guard" else calls[::-1])]
    guard, clipping = handles if first == "guard" else handles[::-1]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        before = values(optimizer)
        some = optimizer.param_groups[0]["params"]
        scaler.scale(sum((one * (step + 3.0)).sum() for one in some)).backward()
        scaler.unscale_(optimizer)
        gradclip.clip_grad_norm_(some, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert moved(optimizer, before) == pytest.approx([0.5] * 4, rel=1e-4)
    assert (guard.looks, guard.steps, clipping.steps) == (2, 4, 4)
    assert guard.norm == pytest.approx(1.0)
    assert not guard.reports
