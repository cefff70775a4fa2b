"""Clipping within the steps of optimizers that several processes take together, each for its own parameters."""

import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gradclip
from gradclip import clip_at_step
from scaled import stepped
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
GRADIENT = torch.tensor([3.0, 4.0])


def descent(make=torch.optim.SGD, **settings):
    weight = torch.nn.Parameter(torch.zeros(2))
    return weight, make([weight], lr=1.0, fused=True, **settings)


def together(optimizer, max_norm=1.0, **settings):
    return clip_at_step(optimizer, max_norm, process_group=dist.group.WORLD, **settings, fused=True)


def overflowing(on):
    """Return the gradient of a loss that overflows on one process."""
    return torch.tensor([1.0, math.inf]) if dist.get_rank() == on else GRADIENT


def refused_by_all(kind, words, wrong, right):
    """Check that all processes raise where the last one alone makes the wrong call."""
    if dist.get_rank() == WORLD - 1:
        with pytest.raises(kind, match=words):
            wrong()
    else:
        with pytest.raises(RuntimeError, match=f"rank {WORLD - 1}: {kind.__name__}: .*{words}"):
            right()


def an_overflow_on_one_process_is_skipped_by_all():
    for make, settings in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
        for nonfinite in ("propagate", "raise", "skip"):
            for unscale in (False, True):
                weight, optimizer = descent(make, **settings)
                together(optimizer, nonfinite=nonfinite)
                scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
                for on in (WORLD - 1, 0):
                    stepped(scaler, weight, optimizer, overflowing(on), unscale=unscale)
                    assert weight.tolist() == [0.0, 0.0], (make, nonfinite, unscale)
                    assert {"grad_scale", "found_inf"}.isdisjoint(vars(optimizer))
                assert scaler.get_scale() == 16.0
                stepped(scaler, weight, optimizer, GRADIENT * (1 + dist.get_rank()), unscale=unscale)
                assert weight.tolist() != [0.0, 0.0]


def a_process_without_gradients_skips_and_lowers_its_scale_with_the_others():
    for nonfinite, unscale in (("propagate", False), ("propagate", True), ("raise", False), ("zero", True)):
        weight, optimizer = descent()
        clipping = clip_at_step(optimizer, 1.0, nonfinite=nonfinite, process_group=dist.group.WORLD)
        without, alone = descent()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for gradient in (overflowing(0), GRADIENT):
            optimizer.zero_grad()
            scaler.scale(without @ GRADIENT + (weight @ gradient if dist.get_rank() == 0 else 0.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            for one in (optimizer, alone):
                scaler.step(one)
            scaler.update()
            assert scaler.get_scale() == 32.0, (nonfinite, unscale)
        assert clipping.norm == 5.0
        assert (weight.tolist() == [0.0, 0.0]) is (dist.get_rank() > 0)


def shards_in_any_layout():
    """Fused kernels go through the memory of a shard and of its gradient side by side."""
    mesh = init_device_mesh("cpu", (WORLD,))
    full = torch.arange(1.0, 25.0).reshape(4, 6)
    transposed = distribute_tensor(full.t().contiguous(), mesh, [Shard(1)]).t()
    expanded = torch.tensor([[2.0], [3.0]])
    repeated = DTensor.from_local(expanded.expand(2, 6), mesh, [Shard(0)])
    replicated = DTensor.from_local(torch.tensor(7.0).expand(4, 6), mesh, [Replicate()])
    for grad, placements in ((transposed, [Shard(0)]), (repeated, [Shard(0)]), (replicated, [Shard(1)])):
        whole = grad.full_tensor().clone()
        for max_norm in (1.0, math.inf):
            weight = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, placements))
            weight.grad = grad
            optimizer = torch.optim.AdamW([weight], betas=(0.5, 0.5), fused=True)
            clipping = clip_at_step(optimizer, max_norm, fused=True)
            optimizer.step()
            norm = torch.linalg.vector_norm(whole)
            torch.testing.assert_close(clipping.norm, norm)
            used = 2 * optimizer.state[weight]["exp_avg"].full_tensor()
            torch.testing.assert_close(used, whole * min(1.0, max_norm / norm.item()))
    assert expanded.tolist() == [[2.0], [3.0]]


def scales_that_differ_are_an_error():
    weight, optimizer = descent()
    together(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0 if dist.get_rank() == WORLD - 1 else 64.0)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"scale of GradScaler is .*32.0 on rank {WORLD - 1}.*ShardedGradScaler"):
            stepped(scaler, weight, optimizer)
        assert weight.tolist() == [0.0, 0.0]


def a_scale_that_only_one_process_has_is_an_error():
    weight, optimizer = descent()
    together(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"scale of GradScaler is 64.0 on rank 0, not given on rank 1"):
        stepped(scaler, weight, optimizer)


def a_spike_leaves_the_scale_as_it_is():
    weight, optimizer = descent()
    clipping = together(optimizer, gradclip.AdaptiveThreshold(gradclip.QuantileRule(factor=2.0), skip_above=4.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for times in (1.0, 1.0, 1000.0):
        before = weight.tolist()
        stepped(scaler, weight, optimizer, GRADIENT * times * (1 + dist.get_rank()))
    assert clipping.max_norm.num_skipped == 1
    assert (weight.tolist(), scaler.get_scale()) == (before, 64.0)


def a_scaler_of_all_goes_on_after_an_overflow():
    for made_by_copy in (False, True):
        weight, optimizer = descent()
        if made_by_copy:
            optimizer = copy.deepcopy(optimizer)
            weight = optimizer.param_groups[0]["params"][0]
        clipping = together(optimizer)
        scaler = ShardedGradScaler("cpu", init_scale=64.0, process_group=dist.group.WORLD)
        stepped(scaler, weight, optimizer, overflowing(WORLD - 1), unscale=True)
        assert weight.tolist() == [0.0, 0.0]
        mine = GRADIENT * (1 + dist.get_rank())  # equal gradients would be refused as replicas
        stepped(scaler, weight, optimizer, mine, unscale=True)
        assert scaler.get_scale() == 32.0
        torch.testing.assert_close(clipping.norm, torch.tensor(5.0 * math.sqrt(5.0)))
        torch.testing.assert_close(weight.detach(), -mine / clipping.norm)


def an_overflow_of_a_copy_is_skipped_by_all():
    """PyTorch's copy is not marked as one that divides by the scale, so that GradScaler would not call its step."""
    _, original = descent()
    optimizer = copy.deepcopy(original)
    weight = optimizer.param_groups[0]["params"][0]
    together(optimizer)
    stepped(torch.amp.GradScaler("cpu", init_scale=64.0), weight, optimizer, overflowing(WORLD - 1))
    assert weight.tolist() == [0.0, 0.0]


def what_no_scaler_found_is_raised_by_all():
    weight, optimizer = descent()
    together(optimizer, nonfinite="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(weight @ GRADIENT).backward()
    scaler.unscale_(optimizer)
    if dist.get_rank() == 0:
        weight.grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"rank 0: .*1 NaN"):
        scaler.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]


def arguments_of_folding_that_are_wrong_on_one():
    of_order_1 = gradclip.AdaptiveThreshold()
    gradclip.clip_grad_norm_([holder(GRADIENT)], of_order_1, 1, process_group=[])
    cases = [
        (ValueError, "must not be negative", lambda o: together(o, -1.0)),
        (ValueError, "max_norm must be 0, inf, or between", lambda o: together(o, 2.0**-60)),
        (TypeError, "max_norm must be a real number", lambda o: together(o, "1")),
        (ValueError, "ord must be", lambda o: together(o, ord=0)),
        (ValueError, "a fused step cannot clip with nonfinite='zero'", lambda o: together(o, nonfinite="zero")),
        (ValueError, "has observed norms of ord=1", lambda o: together(o, of_order_1)),
        (TypeError, "must be an optimizer of torch.optim", lambda o: together("Adam")),
        (TypeError, "only steps of Adam, AdamW", lambda o: together(torch.optim.RMSprop(descent()[1].param_groups))),
        (ValueError, "not created with fused=True", lambda o: together(torch.optim.SGD([descent()[0]]))),
    ]
    for kind, words, wrong in cases:
        _, optimizer = descent()
        refused_by_all(kind, words, lambda: wrong(optimizer), lambda: together(optimizer))  # noqa: B023
        together(optimizer)  # nothing is left of the calls before
        refused_by_all(ValueError, "already called", lambda: together(optimizer), lambda: together(descent()[1]))  # noqa: B023
        with pytest.raises(ValueError, match=r"max_norm is \[1\.0\] on rank 0, \[2\.0\] on rank 1"):
            together(descent()[1], 1.0 + dist.get_rank())


def holder(gradient):
    weight, _ = descent()
    weight.grad = gradient.clone()
    return weight


def an_adaptive_threshold_of_another_order_at_a_step():
    weight, optimizer = descent()
    clipping = together(optimizer)
    other = gradclip.AdaptiveThreshold()
    gradclip.clip_grad_norm_([holder(GRADIENT)], other, 1, process_group=[])
    weight.grad = GRADIENT.clone()
    if dist.get_rank() == WORLD - 1:
        clipping.max_norm = other
    refused_by_all(ValueError, "has observed norms of ord=1", optimizer.step, optimizer.step)
    assert weight.tolist() == [0.0, 0.0]
    assert other.steps == 1


def a_group_that_is_no_longer_fused_on_one():
    weight, optimizer = descent()
    together(optimizer)
    weight.grad = GRADIENT.clone()
    if dist.get_rank() == WORLD - 1:
        optimizer.load_state_dict(torch.optim.SGD([weight], lr=1.0).state_dict())
    refused_by_all(ValueError, "not created with fused=True", optimizer.step, optimizer.step)
    assert weight.tolist() == [0.0, 0.0]


def steps_that_only_some_would_skip():
    words = r"skip_above is 4.0 on rank 0, 5.0 on rank 1"
    with pytest.raises(ValueError, match=words):
        together(descent()[1], gradclip.AdaptiveThreshold(skip_above=4.0 + dist.get_rank()))
    weight, optimizer = descent(momentum=0.9)
    clipping = together(optimizer, gradclip.AdaptiveThreshold(skip_above=4.0))
    clipping.max_norm = gradclip.AdaptiveThreshold(skip_above=4.0 + dist.get_rank())
    weight.grad = GRADIENT * (1 + dist.get_rank())
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]


if __name__ == "__main__":
    run_all(globals())
