"""Gradients of weights that several processes have, such as stages of a pipeline: one counts them, all scale them."""

import itertools
import math
import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

import gradclip
from gradclip import clip_at_step
from gradients import close, numbers, on_one_process, parameter, same_everywhere, unseen
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def tied_between_stages(mark):
    """Return the parameters of this stage, the first of which the first and the last stage have; and all gradients."""
    rank, full = dist.get_rank(), [numbers(4, 3, seed=8), *(numbers(5, seed=n) for n in range(WORLD))]
    own, tied = parameter(full[1 + rank]), parameter(full[0])
    copy = rank == WORLD - 1
    if not copy and rank > 0:
        return [{"params": [own]}], full
    if mark == "by attribute":
        tied.shared = copy
        return [{"params": [tied, own]}], full
    return [{"params": [tied], "shared": copy}, {"params": [own]}], full


def what_stages_share_counts_once():
    for mark, ord in itertools.product(("by attribute", "by key"), (1, 2, 3, math.inf)):
        given, full = tied_between_stages(mark)
        norm, clipped = on_one_process(full, 0.5, ord)
        found = gradclip.clip_grad_norm_(given, 0.5, ord, process_group=dist.group.WORLD)
        same_everywhere(found)
        close(found, norm, ord)
        every = [p.grad for group in given for p in group["params"]]
        expected = [clipped[1 + dist.get_rank()]] if len(every) == 1 else [clipped[0], clipped[1 + dist.get_rank()]]
        for grad, one in zip(every, expected, strict=True):
            close(grad, one, ord)


def what_stages_share_counts_once_at_the_threshold():
    for value, kept in ((5.0, True), (math.nextafter(5.0, 0.0), False)):
        tied = parameter(torch.tensor([3.0]))
        own = parameter(torch.tensor([4.0 if dist.get_rank() == 0 else 0.0]))
        given = [{"params": [tied], "shared": dist.get_rank() > 0}, {"params": [own]}]
        assert gradclip.clip_grad_norm_(given, value, process_group=dist.group.WORLD) == 5.0
        assert (tied.grad.item() == 3.0) is kept


def a_copy_that_is_not_finite(value, **limits):
    """Return parameter groups: of all copies of the first gradient, only the last, which no process counts, has it."""
    tied, own = parameter(torch.tensor([3.0, 4.0])), parameter(torch.ones(1))
    if dist.get_rank() == WORLD - 1:
        tied.grad[0] = value
    return [{"params": [tied], "shared": dist.get_rank() > 0, **limits}, {"params": [own]}]


def check_policy(nonfinite, value, limits):
    given = a_copy_that_is_not_finite(value, **limits)
    call = partial(gradclip.clip_grad_norm_, given, 1.0, process_group=dist.group.WORLD, nonfinite=nonfinite)
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match=f"rank {WORLD - 1}"):
            call()
        return
    norm = call()
    every = torch.cat([p.grad for group in given for p in group["params"]])
    assert math.isfinite(norm) is (nonfinite == "zero"), nonfinite
    expected = {"propagate": torch.isnan(every), "drop": every == 0.0, "zero": torch.isfinite(every)}[nonfinite]
    assert expected.all(), (nonfinite, limits, every)


def what_is_not_finite_counts_in_what_another_process_counts():
    for *asked, seen in itertools.product(
        ("propagate", "drop", "zero", "raise"), (math.nan, math.inf), ({}, {"max_norm": 0.5}), (True, False)
    ):
        with nullcontext() if seen else unseen():
            check_policy(*asked)


def a_copy_that_is_not_finite_skips_the_step_on_all():
    for limits in ({}, {"max_norm": 0.5}, {"max_norm": gradclip.AdaptiveThreshold()}):
        groups = a_copy_that_is_not_finite(math.nan, **limits)
        optimizer = torch.optim.SGD(groups, lr=1.0)
        clipping = clip_at_step(optimizer, 1.0, nonfinite="skip", process_group=dist.group.WORLD)
        optimizer.step()
        assert all(p.grad is None and not p.any() for group in groups for p in group["params"]), limits
        assert not math.isfinite(clipping.norm)


def what_stages_share_counts_once_in_a_part():
    given, full = tied_between_stages("by key")
    for group in given[:1]:
        group["max_norm"] = 0.5
    if len(given) == 1:
        given = [{"params": [], "max_norm": 0.5}, {"params": given[0]["params"]}]
    norm = gradclip.clip_grad_norm_(given, 0.25, process_group=dist.group.WORLD)
    close(norm, on_one_process(full, 1.0)[0])
    if given[0]["params"]:
        close(given[0]["params"][0].grad, on_one_process(full[:1], 0.5)[1][0])


def what_stages_share_counts_once_at_steps():
    for fused in (False, True):
        given, full = tied_between_stages("by key")
        optimizer = torch.optim.AdamW([{**group, "lr": 0.0} for group in given], fused=fused)
        clipping = clip_at_step(optimizer, 0.5, process_group=dist.group.WORLD)
        watched = gradclip.guard(optimizer, 0.5, process_group=dist.group.WORLD)
        optimizer.step()
        close(clipping.norm, on_one_process(full, 1.0)[0])
        if not fused:
            assert watched.norm <= 0.5 + 1e-6
            assert watched.norm > 0.499
        clipping.remove()
        watched.remove()


def one_process_counts_what_it_shares():
    p, q = parameter(torch.tensor([3.0])), parameter(torch.tensor([4.0]))
    assert gradclip.grad_norm([{"params": [p, q], "shared": True}]) == 5.0
    with pytest.raises(TypeError, match=r"parameters\[0\]\['shared'\] must be True or False, got 'yes'"):
        gradclip.grad_norm([{"params": [p, q], "shared": "yes"}])


if __name__ == "__main__":
    run_all(globals())
