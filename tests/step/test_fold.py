"""Clipping within the step of fused optimizers: the same as clipping before the step, and nothing left behind."""

import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip
from gradclip import clip_at_step

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
SHAPES = ((), (1,), (17,), (65, 33))
POLICIES = ("propagate", "raise", "skip")


def parameters(dtype=torch.float32, shapes=SHAPES, device="cpu"):
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in shapes]


def plain(grad=(3.0, 4.0), **settings):
    """Return a parameter of two zeros with a gradient, and descent on it that takes the gradient as it is."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor(grad)
    return weight, torch.optim.SGD([weight], lr=1.0, fused=True, **settings)


def give_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def left(optimizer):
    return {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_after_clipping(make, dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    folded, after = make(ours), make(theirs)
    clipping = clip_at_step(folded, 1.0, fused=True)
    for seed, scale in enumerate([1.0, 1e-4, 100.0, 0.01]):
        give_gradients(ours, seed, scale)
        give_gradients(theirs, seed, scale)
        norm = gradclip.clip_grad_norm_(theirs, 1.0)
        folded.step()
        after.step()
        assert torch.equal(clipping.norm, norm)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=5e-7, atol=0)
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert left(folded) == set()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_not_clipped_has_the_bits_of_a_plain_step(make):
    ours, theirs = parameters(), parameters()
    folded, unclipped = make(ours), make(theirs)
    clip_at_step(folded, 1e6, fused=True)
    for params, optimizer in ((ours, folded), (theirs, unclipped)):
        give_gradients(params, 1)
        optimizer.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("threshold", "set_"), [(5.0, set()), (1.0, {"grad_scale"})])
def test_on_the_host_what_is_kept_is_not_divided(threshold, set_):
    """With a divisor of 1, too, the kernels would write every gradient."""
    _, optimizer = plain()
    clip_at_step(optimizer, threshold, fused=True)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(left(optimizer)))
    optimizer.step()
    assert seen == [set_]


def test_a_norm_equal_to_the_threshold_is_kept():
    weight, optimizer = plain()
    clip_at_step(optimizer, 5.0, fused=True)
    optimizer.step()
    assert weight.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize(("ord", "norm"), [(1, 7.0), (2, 5.0), (math.inf, 4.0)])
def test_of_each_order(ord, norm):
    weight, optimizer = plain()
    clipping = clip_at_step(optimizer, norm / 2, ord=ord, fused=True)
    optimizer.step()
    assert clipping.norm.item() == pytest.approx(norm)
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.5, -2.0]))


def test_parameter_groups_share_the_norm():
    params = parameters(shapes=((2,), (2,)))
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 2.0}], lr=1.0, fused=True)
    clipping = clip_at_step(optimizer, 6.5, fused=True)
    params[0].grad, params[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0, 0.0])
    optimizer.step()
    assert clipping.norm.item() == 13.0
    torch.testing.assert_close(params[0].detach(), torch.tensor([-0.5, -1.0]))
    torch.testing.assert_close(params[1].detach(), torch.tensor([-11.0, 1.0]))


def test_gradients_that_a_closure_makes():
    weight, optimizer = plain()
    weight.grad = None
    clipping = clip_at_step(optimizer, 1.0, fused=True)

    def closure():
        optimizer.zero_grad()
        loss = weight @ torch.tensor([3.0, 4.0])
        loss.backward()
        return loss

    for step in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        assert step(closure) is not None
        assert clipping.norm.item() == 5.0
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.2, -1.6]))
    assert left(optimizer) == set()


def test_without_any_gradient():
    weight, optimizer = plain()
    weight.grad = None
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    optimizer.step()
    assert clipping.norm.item() == 0.0


@pytest.mark.parametrize("threshold", [0.0, math.inf])
def test_thresholds_at_the_ends(threshold):
    weight, optimizer = plain()
    clip_at_step(optimizer, threshold, fused=True)
    optimizer.step()
    assert weight.tolist() == ([0.0, 0.0] if threshold == 0 else [-3.0, -4.0])


@pytest.mark.after_error
def test_the_threshold_may_change():
    weight, optimizer = plain()
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    clipping.max_norm = torch.tensor(2.5)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.5, -2.0]))
    with pytest.raises(ValueError, match=r"between 2\*\*-50 and 2\*\*100 .* got 1e-20"):
        clipping.max_norm = 1e-20
    assert clipping.max_norm == 2.5


# What is left behind


def test_the_state_is_that_of_a_plain_optimizer():
    _, folded = plain(momentum=0.9)
    _, other = plain(momentum=0.9)
    clip_at_step(folded, 100.0, fused=True)
    folded.step()
    other.step()
    ours, theirs = folded.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    copy.deepcopy(folded).step()
    folded.load_state_dict(theirs)


@pytest.mark.after_error
def test_after_an_error_in_the_step_nothing_is_left():
    weight, optimizer = plain()
    clip_at_step(optimizer, 1.0, fused=True)

    def fail(*_):
        raise KeyError("in a later hook")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="in a later hook"):
        optimizer.step()
    assert left(optimizer) == set()
    hook.remove()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_other_optimizers_are_as_they_were():
    _, optimizer = plain()
    other_weight, other = plain()
    plain_adam = torch.optim.Adam([other_weight])
    clip_at_step(optimizer, 1.0, fused=True)
    optimizer.step()
    other.step()
    assert other_weight.tolist() == [-3.0, -4.0]
    plain_adam.step()


def test_remove_ends_it():
    weight, optimizer = plain()
    before = set(vars(optimizer))
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    clipping.remove()
    clipping.remove()
    optimizer.step()
    assert weight.tolist() == [-3.0, -4.0]
    assert set(vars(optimizer)) == before
    clip_at_step(optimizer, 1.0, fused=True).remove()


@pytest.mark.parametrize("scheduled_first", [False, True])
def test_with_a_scheduler_of_the_learning_rate(scheduled_first):
    weight, optimizer = plain()

    def schedule():
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    scheduler = schedule() if scheduled_first else None
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    scheduler = scheduler or schedule()
    optimizer.step()
    scheduler.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    clipping.remove()
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    scheduler.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-2.1, -2.8]))


# NaN and infinities


def test_propagated_to_all():
    params = parameters(shapes=((2,), (2,)))
    optimizer = torch.optim.SGD(params, lr=1.0, fused=True)
    clip_at_step(optimizer, 1.0, fused=True)
    params[0].grad, params[1].grad = torch.tensor([math.inf, 1.0]), torch.tensor([1.0, 1.0])
    optimizer.step()
    assert all(torch.isnan(p).all() for p in params)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_step_changes_nothing_and_is_as_if_it_had_not_been(make):
    ours, theirs = parameters(), parameters()
    folded, other = make(ours), make(theirs)
    clipping = clip_at_step(folded, 1e6, nonfinite="skip", fused=True)
    give_gradients(ours, 0)
    ours[1].grad.fill_(math.nan)
    folded.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in ours)
    assert math.isnan(clipping.norm)
    for params, optimizer in ((ours, folded), (theirs, other)):
        for seed in (1, 2):
            give_gradients(params, seed)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    torch.testing.assert_close(folded.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.after_error
def test_raised_before_the_step():
    weight, optimizer = plain((math.nan, 1.0))
    clip_at_step(optimizer, 1.0, nonfinite="raise", fused=True)
    with pytest.raises(FloatingPointError, match=r"parameters\[0\]\['params'\]\[0\].grad: 1 NaN"):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    assert left(optimizer) == set()


# Accelerators


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_nothing_waits_for_an_accelerator(monkeypatch, make, nonfinite, scaled):
    """A fake tensor has no values, so that asking for one raises."""
    for name in ("_fused_sgd_", "_fused_adagrad_"):  # fake tensors do not know these
        monkeypatch.setattr(torch, name, lambda *_, **__: None)
    with FakeTensorMode():
        params = parameters(shapes=((2, 3), (5,)), device="cuda")
        optimizer = make(params)
        clipping = clip_at_step(optimizer, 1.0, nonfinite=nonfinite, fused=True)
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = torch.ones(2, device="cuda").unbind()
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert clipping.norm.device.type == "cuda"
        assert len(left(optimizer)) == 2 * scaled
