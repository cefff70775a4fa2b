"""Clipping at the steps of optimizers that are not fused, where processes hold different parts."""

import itertools
import math
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradclip
from gradclip import clip_at_step
from gradients import same_everywhere
from scaled import stepped
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def descent(make=torch.optim.SGD, **settings):
    weight = torch.nn.Parameter(torch.zeros(2))
    return weight, make([weight], lr=1.0, **settings)


def different_parameters_share_one_norm():
    for fused in (False, True):
        weight, optimizer = descent(fused=fused)
        clipping = clip_at_step(optimizer, 1.0, process_group=dist.group.WORLD)
        mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())  # equal gradients would be refused as replicas
        weight.grad = mine.clone()
        optimizer.step()
        assert clipping.norm.item() == pytest.approx(5.0 * math.sqrt(5.0))
        torch.testing.assert_close(weight.detach(), -mine / clipping.norm)


def a_step_that_one_process_spoils_is_skipped_by_all():
    for max_norm in (1.0, gradclip.AdaptiveThreshold()):
        weight, optimizer = descent(torch.optim.AdamW)
        clipping = clip_at_step(optimizer, max_norm, nonfinite="skip", process_group=dist.group.WORLD)
        weight.grad = torch.tensor([1.0, math.nan if dist.get_rank() == WORLD - 1 else 1.0])
        optimizer.step()
        assert weight.tolist() == [0.0, 0.0]
        assert not optimizer.state
        assert clipping.numbers()["grad_norm_clipped"] == 0.0


def an_overflow_on_one_process_is_skipped_by_all():
    mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())
    for make in (torch.optim.SGD, torch.optim.AdamW):
        for nonfinite in ("propagate", "raise", "skip", "zero"):
            for unscale in (False, True):
                weight, optimizer = descent(make)
                clipping = clip_at_step(optimizer, 1.0, nonfinite=nonfinite, process_group=dist.group.WORLD)
                scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
                infinite = torch.tensor([1.0, math.inf])
                for on in (WORLD - 1, 0):
                    stepped(scaler, weight, optimizer, infinite if dist.get_rank() == on else mine, unscale=unscale)
                    assert weight.tolist() == [0.0, 0.0], (make, nonfinite, unscale)
                    assert not optimizer.state
                assert scaler.get_scale() == 16.0
                stepped(scaler, weight, optimizer, mine, unscale=unscale)
                assert clipping.norm.item() == pytest.approx(5.0 * math.sqrt(5.0))
                assert weight.tolist() != [0.0, 0.0]
                clipping.remove()


def a_step_without_a_scaler_raises_for_nan_after_one_with_a_scaler_failed():
    weight, optimizer = descent()
    clipping = clip_at_step(optimizer, 1.0, nonfinite="raise", process_group=dist.group.WORLD)
    mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())
    clipping.max_norm = 1.0 + dist.get_rank()
    with pytest.raises(ValueError, match="different arguments"):
        stepped(torch.amp.GradScaler("cpu", init_scale=64.0), weight, optimizer, mine)
    clipping.max_norm = 1.0
    weight.grad = mine * math.nan
    with pytest.raises(FloatingPointError):
        optimizer.step()


def guards_hear_of_an_overflow_before_the_step_that_clips():
    """On all processes, whichever was made first, and in whatever order they are kept."""
    mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())
    for trial in range(12):
        weight, optimizer = descent()
        made = [
            partial(clip_at_step, optimizer, 1.0, process_group=dist.group.WORLD),
            partial(gradclip.guard, optimizer, 1.0, process_group=dist.group.WORLD),
        ]
        kept = [make() for make in (made if trial % 2 else reversed(made))]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        stepped(scaler, weight, optimizer, torch.tensor([1.0, math.inf]) if dist.get_rank() == 0 else mine)
        assert (weight.tolist(), scaler.get_scale()) == ([0.0, 0.0], 32.0)
        for one in kept:
            one.remove()


class Around:
    """Steps an optimizer, as ScheduleFree's wrapper does."""

    def __init__(self, inner):
        self.base_optimizer, self.param_groups = inner, inner.param_groups
        self.zero_grad, self.step = inner.zero_grad, inner.step


def an_overflow_is_skipped_by_all_where_the_scaler_steps_an_optimizer_around():
    mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())
    infinite = torch.tensor([1.0, math.inf])
    for fused, momentum, nonfinite in itertools.product((False, True), (0.0, 0.9), ("propagate", "raise", "skip")):
        weight, inner = descent(fused=fused, momentum=momentum)
        optimizer = Around(inner)
        clipping = clip_at_step(optimizer, 1.0, nonfinite=nonfinite, process_group=dist.group.WORLD)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for on in (0, WORLD - 1):
            stepped(scaler, weight, optimizer, infinite if dist.get_rank() == on else mine)
            assert weight.tolist() == [0.0, 0.0], (fused, momentum, nonfinite)
        assert (scaler.get_scale(), clipping.steps) == (16.0, 2)
        stepped(scaler, weight, optimizer, mine)
        torch.testing.assert_close(weight.detach(), -mine / (5.0 * math.sqrt(5.0)))


def an_overflow_is_skipped_by_all_where_groups_have_thresholds_or_optimizers_are_fused():
    mine = torch.tensor([3.0, 4.0]) * (1 + dist.get_rank())
    for fused in (False, True):
        for max_norm in (1.0, gradclip.AdaptiveThreshold()):
            weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
            groups = [{"params": weights[:1]}, {"params": weights[1:], "max_norm": max_norm}]
            optimizer = torch.optim.SGD(groups, lr=1.0, fused=fused)
            clip_at_step(optimizer, 0.5, process_group=dist.group.WORLD)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            spoilt = torch.tensor([1.0, math.inf]) if dist.get_rank() == WORLD - 1 else mine
            for step, gradient in enumerate((spoilt, mine)):
                scaler.scale(weights[0] @ gradient + weights[1] @ mine).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                assert (weights[1].tolist() == [0.0, 0.0]) is (step == 0)


def an_overflow_in_one_shard_is_skipped_by_all():
    for make, settings in ((torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True})):
        model = torch.nn.Linear(1, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = make(model.parameters(), lr=1.0, **settings)
        clip_at_step(optimizer, 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        before = model.weight.full_tensor().tolist()
        for values in ([1.0, 2.0, math.inf, 4.0], [math.inf, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]):
            scaler.scale((model(torch.ones(1, 1)) * torch.tensor(values)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (model.weight.full_tensor().tolist() == before) is (math.inf in values), (make, values)
        assert scaler.get_scale() == 16.0


def a_gradient_that_cannot_be_unscaled_is_told_to_all():
    weight, optimizer = descent()
    clip_at_step(optimizer, 1.0, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(weight @ torch.tensor([3.0, 4.0])).backward()
    if dist.get_rank() == WORLD - 1:
        weight.grad = None
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)
    else:
        with pytest.raises(RuntimeError, match=f"rank {WORLD - 1}: AssertionError: No inf checks"):
            scaler.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]


def a_scaler_that_only_one_process_has_is_an_error():
    weight, optimizer = descent()
    clip_at_step(optimizer, 1.0, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dist.get_rank() == 0)
    with pytest.raises(ValueError, match="nonfinite is 'drop' on rank 0, 'propagate' on rank 1"):
        stepped(scaler, weight, optimizer, torch.tensor([3.0, 4.0]) * (1 + dist.get_rank()))
    assert weight.tolist() == [0.0, 0.0]


def updates_of_distributed_tensors_count_as_a_whole():
    """As on one process, also where a process has no gradient, or holds no part of a parameter."""
    m, generator = init_device_mesh("cpu", (WORLD,)), torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator) for shape in ((3, 2), (1, 4), (5,))]
    theirs = [torch.nn.Parameter(one.clone()) for one in full]
    ours = [torch.nn.Parameter(distribute_tensor(one, m, [Shard(0)])) for one in full[:2]]
    ours.append(torch.nn.Parameter(distribute_tensor(full[2], m, [Replicate()])))
    for make in (torch.optim.AdamW, type("Derived", (torch.optim.AdamW,), {})):
        one, other = (make(some, lr=0.1, betas=(0.5, 0.999)) for some in (ours, theirs))
        by_parts, _ = (gradclip.clip_update_at_step(optimizer, 0.7) for optimizer in (one, other))
        for scale in (1e-3, 1e-3, 1.0):
            for mine, their in zip(ours, theirs, strict=True):
                their.grad = torch.randn(their.shape, generator=generator) * scale
                mine.grad = distribute_tensor(their.grad, m, mine.placements)
            if scale == 1.0 and dist.get_rank() == 0:
                ours[1].grad = None  # gets none: the update of the others counts all the same
            one.step()
            other.step()
        assert by_parts.rms > 0.7
        torch.testing.assert_close(ours[0].full_tensor(), theirs[0].detach())
        torch.testing.assert_close(ours[2].full_tensor(), theirs[2].detach())
        same_everywhere(by_parts.rms)


def shards_of_fsdp2_share_one_norm():
    for make, settings in ((torch.optim.SGD, {}), (torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        torch.manual_seed(0)
        ours = torch.nn.Linear(6, 4)
        theirs = torch.nn.Linear(6, 4)
        theirs.load_state_dict(ours.state_dict())
        fully_shard(ours, mesh=init_device_mesh("cpu", (WORLD,)))
        one, other = (make(model.parameters(), lr=0.1, **settings) for model in (ours, theirs))
        clipping = clip_at_step(one, gradclip.AdaptiveThreshold(skip_above=4.0), nonfinite="skip")
        by_hand = gradclip.AdaptiveThreshold(skip_above=4.0)
        for scale in (1.0, 1.0, 300.0, 2.0, 1.0):
            x = torch.full((1, 6), scale)
            for model in (ours, theirs):
                model.zero_grad()
                model(x).sum().backward()
            norm = gradclip.clip_grad_norm_(theirs.parameters(), by_hand)
            one.step()
            if scale < 300.0:
                other.step()
            assert clipping.norm.item() == pytest.approx(norm.item(), rel=1e-6)
        for mine, whole in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), whole, rtol=1e-5, atol=1e-6)
        assert clipping.max_norm.num_skipped == by_hand.num_skipped == 1


def other_scopes_clip_shards_of_fsdp2():
    calls = {
        "layer": gradclip.clip_grad_layer_norm_,
        "unit": gradclip.clip_grad_unit_norm_,
        "value": gradclip.clip_grad_value_,
        "agc": gradclip.adaptive_grad_clip_,
    }
    for scope, call in calls.items():
        torch.manual_seed(0)
        ours, theirs = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
        theirs.load_state_dict(ours.state_dict())
        fully_shard(ours, mesh=init_device_mesh("cpu", (WORLD,)))
        one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs))
        monitor = gradclip.Monitor() if dist.get_rank() and scope != "value" else None
        clipping = clip_at_step(one, 0.5, scope=scope, nonfinite="skip", monitor=monitor)
        for scale in (1.0, math.nan, 2.0):
            for model in (ours, theirs):
                model.zero_grad()
                model(torch.full((1, 6), scale)).sum().backward()
            one.step()
            if scale < math.inf:
                norm = gradclip.grad_norm(theirs.parameters())
                call(theirs.parameters(), 0.5)
                other.step()
        for mine, whole in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), whole, rtol=1e-5, atol=1e-6)
        assert clipping.norm == (pytest.approx(norm.item(), rel=1e-6) if scope == "layer" else None)
        assert monitor is None or (monitor.steps, monitor.num_skipped) == (3, 1)
        numbers = {name: number.item() for name, number in clipping.numbers().items()}
        left = gradclip.grad_norm(theirs.parameters()).item()
        every = {"grad_norm": norm.item(), "grad_norm_clipped": left, "clipped_share": 2 / 3, "skipped_share": 1 / 3}
        assert numbers == (pytest.approx(every | {"clipped_layer_share": 1.0}) if scope == "layer" else {})


def scopes_that_differ_are_refused():
    for other in ({"scope": "unit"}, {}):
        _, optimizer = descent()
        scope = {"scope": "layer"} if dist.get_rank() else other
        with pytest.raises(ValueError, match="the processes passed different arguments: scope is"):
            clip_at_step(optimizer, 1.0, process_group=dist.group.WORLD, **scope)
        clip_at_step(optimizer, 1.0)


def grouped(own):
    """Return two shards of a tensor each, of which the second group has the threshold `own`; "" for none."""
    mesh = init_device_mesh("cpu", (WORLD,))
    body, head = (torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])) for _ in range(2))
    groups = [{"params": [body]}, {"params": [head], **({} if own == "" else {"max_norm": own})}]
    return body, head, torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def give(body, head, norms):
    for one, norm in zip((body, head), norms, strict=True):
        one.grad = distribute_tensor(torch.tensor([0.6, 0.0, 0.8, 0.0]) * norm, one.device_mesh, [Shard(0)])


def groups_of_shards_have_thresholds_of_their_own():
    for own, lengths in ((2.0, (1.0, 2.0)), (None, (1.0, 50.0))):
        body, head, optimizer = grouped(own)
        clipping = clip_at_step(optimizer, 1.0, nonfinite="skip")
        watched = gradclip.guard(optimizer, clipping, every=1, on_mistake="raise")
        give(body, head, (5.0, 50.0))
        optimizer.step()
        watched.remove()
        assert [one.full_tensor().norm().item() for one in (body, head)] == pytest.approx(lengths)
        got = [number.item() for number in clipping.numbers().values()]
        assert got == pytest.approx([math.sqrt(2525), math.hypot(*lengths), 1.0, 0.0])
        before = [one.full_tensor().tolist() for one in (body, head)]
        give(body, head, (5.0, math.nan))
        optimizer.step()
        assert [one.full_tensor().tolist() for one in (body, head)] == before


def a_spike_in_a_group_of_shards_skips_that_group():
    follows = gradclip.AdaptiveThreshold(gradclip.QuantileRule(factor=2.0), skip_above=4.0)
    body, head, optimizer = grouped(follows)
    clip_at_step(optimizer, 1.0)
    for norm in (1.0, 1.0, 1000.0):
        before = body.full_tensor().tolist(), head.full_tensor().tolist()
        give(body, head, (0.5, norm))
        optimizer.step()
    assert follows.num_skipped == 1
    assert head.full_tensor().tolist() == before[1]
    assert body.full_tensor().tolist() != before[0]


def thresholds_of_groups_that_differ_are_refused_by_all():
    for own, other in ((2.0, 3.0), (2.0, None), (2.0, ""), (None, "")):
        optimizer = grouped(own if dist.get_rank() == 0 else other)[2]
        with pytest.raises(ValueError, match="different arguments: max_norm is"):
            clip_at_step(optimizer, 1.0)


def a_threshold_of_a_group_that_follows_another_optimizer_on_one_process():
    mine, taken = gradclip.AdaptiveThreshold(), gradclip.AdaptiveThreshold()
    kept = clip_at_step(descent()[1], taken)
    weight, optimizer = descent()
    clip_at_step(optimizer, 1.0, process_group=dist.group.WORLD)
    wrong = dist.get_rank() == WORLD - 1
    optimizer.param_groups[0]["max_norm"] = taken if wrong else mine
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError if wrong else RuntimeError, match="already follows another optimizer"):
        optimizer.step()
    assert (weight.tolist(), mine.steps, kept.steps) == ([0.0, 0.0], 0, 0)


def mistakes_of_one_process_reach_all():
    _, optimizer = descent()
    wrong = dist.get_rank() == WORLD - 1
    with pytest.raises(ValueError if wrong else RuntimeError, match="max_norm must not be negative"):
        clip_at_step(optimizer, -1.0 if wrong else 1.0, process_group=dist.group.WORLD)


if __name__ == "__main__":
    run_all(globals())
