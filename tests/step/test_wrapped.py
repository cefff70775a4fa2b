"""Optimizers around others: the clipping and the guard go where the step happens, or say what to pass."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import gradclip
from gradclip import clip_at_step
from gradclip._src.step.wrapped import unwrapped
from wrappers import Around, Outside, Sam

TIMM = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def sgd(*weights):
    return torch.optim.SGD(weights, lr=1.0)


def post_local(inner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, at import
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
    return PostLocalSGDOptimizer(inner, object.__new__(PeriodicModelAverager))


MAKE = {
    "base_optimizer": lambda inner: Around(inner, "base_optimizer"),
    "Lookahead of timm": lambda inner: Around(inner, "_base_optimizer", TIMM),
    "Opacus": lambda inner: Around(inner, "original_optimizer"),
    "optim": lambda inner: Around(inner, "optim"),
    "ScheduleFree": lambda inner: Outside(inner, "base"),
    "accelerate": lambda inner: Outside(inner, "optimizer"),
    "accelerate around Lookahead": lambda inner: Outside(Around(inner, "_base_optimizer", TIMM), "optimizer"),
    "accelerate around ScheduleFree": lambda inner: Outside(Outside(inner, "base"), "optimizer"),
    "PostLocalSGD": post_local,
}


@pytest.mark.parametrize("name", MAKE)
def test_it_clips_and_guards_where_the_step_happens(name):
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = sgd(weight)
    outer = MAKE[name](inner)
    assert unwrapped(outer) is inner
    clipping = clip_at_step(outer, 1.0)
    watched = gradclip.guard(outer, 1.0)
    for _ in range(2):
        weight.grad = torch.tensor([30.0, 40.0])
        (inner if name == "PostLocalSGD" else outer).step()  # its own averages over processes
    assert (float(clipping.norm), clipping.steps) == (50.0, 2)
    assert (watched.looks, watched.norm) == (2, pytest.approx(1.0))
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.2, -1.6]))
    watched.remove()
    clipping.remove()
    weight.grad = torch.tensor([30.0, 40.0])
    inner.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-31.2, -41.6]))


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_sharpness_aware_minimization(base, by_closure):
    weight = torch.nn.Parameter(torch.ones(2))
    sam = Sam([weight], lambda groups: base(groups, lr=1.0))
    clipping, watched = clip_at_step(sam, 1.0), gradclip.guard(sam, 1.0)

    def closure():
        loss = (weight * torch.tensor([30.0, 40.0])).sum()
        loss.backward()
        return loss

    for _ in range(3):
        closure()
        if by_closure:
            sam.step(closure)
        else:
            sam.first_step()
            closure()
            sam.second_step()
    assert (float(clipping.norm), clipping.steps) == (pytest.approx(50.0), 3)
    assert (watched.looks, watched.norm, watched.reports) == (2, pytest.approx(1.0), [])
    if base is torch.optim.SGD:
        torch.testing.assert_close(weight.detach(), torch.tensor([1.0, 1.0]) - 3 * torch.tensor([0.6, 0.8]))
    watched.remove()


def test_one_with_hooks_that_has_more_parameters_steps_itself():
    """As ZeroRedundancyOptimizer, whose inner optimizer has this process's share."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]

    class Sharded(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.optim = sgd(weights[0])

        def step(self):
            self.optim.step()

    outer = Sharded(weights)
    assert unwrapped(outer) is outer
    clipping = clip_at_step(outer, 1.0)
    for weight, slope in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.tensor([slope, 0.0])
    outer.step()
    assert float(clipping.norm) == 5.0
    torch.testing.assert_close(weights[0].detach(), torch.tensor([-0.6, 0.0]))


SCHEDULES = {
    "StepLR": lambda one: torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "in sequence": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one, [torch.optim.lr_scheduler.ConstantLR(one), torch.optim.lr_scheduler.StepLR(one, 1)], [1]
    ),
    "one of the user's own": lambda one: SimpleNamespace(optimizer=one, step=one.step),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_scheduler_stands_for_its_optimizer(make):
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = sgd(weight)
    scheduler = make(inner)
    clipping, watched = clip_at_step(scheduler, 1.0), gradclip.guard(scheduler, 1.0)
    weight.grad = torch.tensor([30.0, 40.0])
    inner.step()
    watched.remove()
    clipping.remove()
    assert (clipping.norm, watched.norm) == (50.0, pytest.approx(1.0))
    torch.testing.assert_close(weight.detach(), -torch.tensor([0.6, 0.8]) * inner.param_groups[0]["lr"])


def engine(module, inner):
    kind = type("Fp32Engine", (Outside,), {"__module__": module})
    return kind(inner, "optimizer")


def engine_of_the_user(module, inner):
    kind = type("Fp32Engine", (type(engine(module, inner)),), {"__module__": "__main__"})
    return kind(inner, "optimizer")


@pytest.mark.parametrize("engine", [engine, engine_of_the_user])
@pytest.mark.parametrize("module", ["deepspeed.runtime.zero.stage_1_and_2", "megatron.core.optimizer.optimizer"])
@pytest.mark.parametrize("attach", [lambda one: clip_at_step(one, 1.0), gradclip.guard])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: Outside(one, "optimizer")])
def test_engines_are_refused(module, attach, wrap, engine):
    inner = sgd(torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(TypeError, match=r"got (Fp32Engine|Outside)\. Engines step by themselves.*clip_at_step with"):
        attach(wrap(engine(module, inner)))
    assert not inner._optimizer_step_pre_hooks
    assert not inner._optimizer_step_post_hooks


def test_an_optimizer_of_deepspeed_that_wraps_none_is_one():
    kind = type("FusedAdam", (torch.optim.SGD,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    optimizer = kind([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    assert unwrapped(optimizer) is optimizer


@pytest.mark.parametrize("attach", [lambda one: clip_at_step(one, 1.0), gradclip.guard])
def test_one_whose_steps_cannot_be_seen_is_refused(attach):
    inner = sgd(torch.nn.Parameter(torch.zeros(2)))
    outer = Around(inner, "_hidden", TIMM)
    with pytest.raises(TypeError, match=r"got Around\. Its class does not call Optimizer.__init__.*Pass the optimizer"):
        attach(outer)
    assert not outer._optimizer_step_pre_hooks
    clip_at_step(inner, 1.0)


def test_circles_end():
    inner = sgd(torch.nn.Parameter(torch.zeros(2)))
    inner.optimizer = inner
    assert unwrapped(inner) is inner
    one, other = Outside(None, "optimizer"), Outside(None, "optimizer")
    one.optimizer = other
    with pytest.raises(TypeError, match="got Outside"):
        unwrapped(one)


@pytest.mark.parametrize("attach", [lambda one: clip_at_step(one, 1.0), gradclip.guard])
def test_one_that_steps_several_is_refused(attach):
    """Its own steps have no hooks, and the first that it steps has only some of its parameters."""
    first, second = (sgd(torch.nn.Parameter(torch.zeros(2))) for _ in range(2))
    both = Around(first, "optimizer")
    both.param_groups = [*first.param_groups, *second.param_groups]
    with pytest.raises(TypeError, match=r"got Around\. The optimizer in it has only some of its parameters.*Pass each"):
        attach(both)
    assert not first._optimizer_step_pre_hooks
