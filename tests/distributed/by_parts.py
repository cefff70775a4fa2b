"""Thresholds of parameter groups and of names, over processes: each part by its own norm, with one reduction."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import gradclip
from gradients import check_bound, close, numbers, parameter, same_everywhere
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
FULL = {"encoder.w": numbers(4, 2 * WORLD, seed=1), "encoder.b": numbers(3, seed=2), "head": numbers(5, 2, seed=3)}
FULL["embedding"] = 100 * numbers(2 * WORLD, 2, seed=4)
LAID = {"encoder.w": [Shard(1)], "encoder.b": [Replicate()], "head": [Shard(0)], "embedding": [Shard(0)]}
THRESHOLDS = {"encoder.*": 0.5, "head": 0.25, "*": None}


def named(bad=None):
    mesh = init_device_mesh("cpu", (WORLD,))
    full = {name: x.clone() for name, x in FULL.items()}
    if bad is not None:
        full["embedding"].view(-1)[-1] = bad
    return {name: parameter(x, mesh, LAID[name]) for name, x in full.items()}


def groups(params, own=0.25):
    return [
        {"params": [params["encoder.w"]]},
        {"params": [params["head"]], "max_norm": own},
        {"params": [params["encoder.b"]]},
        {"params": [params["embedding"]], "max_norm": None, "name": "embedding"},
    ]


def on_one_process(**options):
    alone = {name: parameter(x.clone()) for name, x in FULL.items()}
    norm = gradclip.clip_grad_norm_(alone, THRESHOLDS, process_group=[], **options)
    return norm, {name: p.grad for name, p in alone.items()}


def check(norm, params):
    wanted, results = on_one_process()
    same_everywhere(norm)
    close(norm, wanted)
    for name, p in params.items():
        torch.testing.assert_close(p.grad.full_tensor(), results[name], rtol=1e-6, atol=0)


def as_on_one_process():
    params = named()
    with CommDebugMode() as counted:
        norm = gradclip.clip_grad_norm_(groups(params), 0.5)
    assert counted.get_total_counts() == 1, counted.get_comm_counts()
    check(norm, params)
    params = named()
    check(gradclip.clip_grad_norm_(params, THRESHOLDS), params)
    params = named()
    assert torch.equal(gradclip.grad_norm(groups(params)), gradclip.grad_norm(params))


def what_is_not_finite_counts_for_all():
    for bad in (math.nan, math.inf):
        for policy in ("propagate", "drop"):
            params = named(bad)
            assert not gradclip.clip_grad_norm_(groups(params), 0.5, nonfinite=policy).isfinite()
            for p in params.values():
                local = p.grad.to_local()
                assert (local.isnan() if policy == "propagate" else local == 0).all()
        with pytest.raises(FloatingPointError, match=rf"rank {WORLD - 1}: parameters\[3\]"):
            gradclip.clip_grad_norm_(groups(named(bad)), 0.5, nonfinite="raise")
        norm = gradclip.clip_grad_norm_(groups(params := named(bad)), 0.5, nonfinite="zero")
        assert norm.isfinite()
        assert params["embedding"].grad.to_local().isfinite().all()


def adaptive_thresholds_and_monitors():
    own, monitor = gradclip.AdaptiveThreshold(), gradclip.Monitor()
    for _ in range(2):
        gradclip.clip_grad_norm_(groups(named(), own), 0.5, monitor=monitor)
    close(torch.tensor(float(own.norm)), FULL["head"].norm())
    assert monitor.groups["embedding"].last.norm == pytest.approx(float(FULL["embedding"].norm()))
    assert monitor.last.max_norm == 0.5


def names_of_which_each_process_has_some():
    grad = torch.tensor([3.0, 4.0]) * (RANK + 1)
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = grad.clone()
    thresholds = {f"stage{rank}.*": 1.0 + rank for rank in range(WORLD)}
    norm = gradclip.clip_grad_norm_([(f"stage{RANK}.w", p)], thresholds, process_group=dist.group.WORLD)
    close(norm, torch.tensor(5 * math.sqrt(sum((rank + 1) ** 2 for rank in range(WORLD)))))
    torch.testing.assert_close(p.grad, grad / grad.norm() * (1.0 + RANK), rtol=1e-6, atol=0)


def mistakes_reach_all():
    mistakes = {
        "thresholds": lambda params: ({**THRESHOLDS, "head": 0.25 + RANK}, ValueError, "max_norm is"),
        "a name": lambda params: (
            {"encoder.*": 1.0} if RANK == 0 else THRESHOLDS,
            (ValueError, RuntimeError),
            "no pattern of max_norm matches head",
        ),
        "a negative one": lambda params: (
            {**THRESHOLDS, "head": -1.0 if RANK == 0 else 0.25},
            (ValueError, RuntimeError),
            "must not be negative",
        ),
    }
    for mistake in mistakes.values():
        params = named()
        thresholds, error, match = mistake(params)
        refused_by_all(params, params, thresholds, error, match)


def refused_by_all(params, passed, thresholds, error, match, **options):
    with pytest.raises(error, match=match):
        gradclip.clip_grad_norm_(passed, thresholds, **options)
    for name, p in params.items():
        assert torch.equal(p.grad.full_tensor(), FULL[name])


def the_same_thresholds_in_another_order():
    patterns = ["encoder.*", "[!e]*", "embedding"]
    params, thresholds = named(), dict.fromkeys(patterns[:: -1 if RANK else 1], 1.0)
    match = r"order of thresholds is max_norm\['encoder.*'\], .* on rank 0, max_norm\['embedding'\], "
    refused_by_all(params, params, thresholds, ValueError, match)
    params, own = named(), [gradclip.AdaptiveThreshold(skip_above=multiple) for multiple in (4.0, 8.0)]
    thresholds = dict(zip(("encoder.*", "*"), own[:: 1 if RANK else -1], strict=True))
    match = r"skip_above of each is \[8.0, 4.0\] on rank 0, \[4.0, 8.0\]"
    refused_by_all(params, params, thresholds, ValueError, match)


def mistakes_before_the_thresholds_are_read_reach_all():
    for options, words in (({"monitor": 3}, "monitor must be"), ({"ord": 0}, "ord must be")):
        for spelled in (groups, dict):
            for common in (0.5, gradclip.AdaptiveThreshold()):
                params = named()
                limit = common if spelled is groups else {"encoder.*": common, "*": None}
                given = options if RANK == 0 else {}
                refused_by_all(params, spelled(params), limit, (TypeError, ValueError, RuntimeError), words, **given)


def numbers_of_64_bits():
    mesh = init_device_mesh("cpu", (WORLD,))
    full = {name: 1e300 * x.double() for name, x in FULL.items()} | {"head": FULL["head"]}
    params = {name: parameter(x, mesh, LAID[name]) for name, x in full.items()}
    wanted = math.hypot(*(float(x.double().norm()) for x in map(torch.Tensor.div, full.values(), [1e300] * 4))) * 1e300
    norm = gradclip.clip_grad_norm_(params, {"encoder.*": 1e-310, "head": 1.0, "*": 1e300})
    assert norm.dtype == torch.float64
    close(norm, torch.tensor(wanted, dtype=torch.float64))
    check_bound([params["encoder.w"].grad, params["encoder.b"].grad], 1e-310, 2)
    check_bound([params["embedding"].grad], 1e300, 2)
    own = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64 if RANK == 0 else torch.float32))
    own.grad = torch.full_like(own, 1.0 + RANK)
    norm = gradclip.clip_grad_norm_({"w": own}, {"*": 1.0}, process_group=dist.group.WORLD)
    assert norm.dtype == torch.float64


if __name__ == "__main__":
    run_all(globals())
