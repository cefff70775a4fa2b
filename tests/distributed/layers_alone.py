"""Mistakes of one process in calls that clip layers and units: all raise, nothing changes, and the next call works."""

import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import gradclip
from gradients import local, numbers, parameter
from layerwise import CALLS, close
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WRONG = WORLD - 2
"""The process that makes the wrong call."""
HERE = int(os.environ.get("RANK", "0")) == WRONG


def mesh():
    return init_device_mesh("cpu", (WORLD,))


def sharded(count=2):
    return [parameter(numbers(4, 2 * WORLD, seed=seed), mesh(), [Shard(1)]) for seed in range(count)]


def refused_by_all(kind, words, call, params, told=None):
    """Check that the call raises everywhere, changes nothing, and that a right call works afterwards."""
    before = [local(p).clone() for p in params]
    others = pytest.raises(RuntimeError, match=f"rank {WRONG}: {kind.__name__}: .*{words}")
    with pytest.raises(kind, match=words) if HERE or told else others:
        call()
    assert all(torch.equal(local(p), x) for p, x in zip(params, before, strict=True))
    p = parameter(numbers(2 * WORLD), mesh(), [Shard(0)])
    (norm,) = gradclip.clip_grad_layer_norm_([p], 1.0)
    close(norm, torch.linalg.vector_norm(numbers(2 * WORLD)))


def bad_thresholds():
    for call in CALLS:
        for wrong in (-1.0, math.nan):
            params = sharded()
            refused_by_all(
                ValueError,
                "must not be negative",
                lambda: call(params, wrong if HERE else 1.0),  # noqa: B023
                params,
            )


def bad_orders_and_policies():
    for call in CALLS:
        params = sharded()
        refused_by_all(ValueError, "ord must be", lambda: call(params, 1.0, 0 if HERE else 2), params)  # noqa: B023
        refused_by_all(
            ValueError,
            "nonfinite must be",
            lambda: call(params, 1.0, nonfinite="no" if HERE else "drop"),  # noqa: B023
            params,
        )


def a_list_of_the_wrong_length():
    params = sharded()
    for call in CALLS[:2]:
        refused_by_all(
            ValueError,
            "got a list of 1",
            lambda: call(params, [1.0] if HERE else [1.0, 2.0]),  # noqa: B023
            params,
        )


def integers():
    for call in CALLS:
        params = sharded()
        if HERE:
            broken = torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
            broken.grad = torch.ones(2, dtype=torch.int64)
            params[1] = broken
        refused_by_all(TypeError, "int64", lambda: call(params, 1.0), params)  # noqa: B023


def different_arguments():
    for call in CALLS:
        params = sharded()
        for given in (
            lambda: call(params, 1.0 + HERE),  # noqa: B023
            lambda: call(params, 1.0, 2 - HERE),  # noqa: B023
            lambda: call(params, 1.0, nonfinite="drop" if HERE else "zero"),  # noqa: B023
        ):
            refused_by_all(ValueError, f"passed different arguments: .* on rank {WRONG}", given, params, told=True)
    params = sharded()
    refused_by_all(
        ValueError,
        r"max_norm is \[1.0, 2.0\] on ranks 0, 2, \[1.0, 3.0\] on rank 1",
        lambda: gradclip.clip_grad_layer_norm_(params, [1.0, 2.0 + HERE]),
        params,
        told=True,
    )
    refused_by_all(
        ValueError,
        "unit_axis is 0 on ranks 0, 2, -1 on rank 1",
        lambda: gradclip.clip_grad_unit_norm_(params, 1.0, unit_axis=-1 if HERE else 0),
        params,
        told=True,
    )
    for name in ("clipping", "eps"):
        refused_by_all(
            ValueError,
            f"{name} is 0.25 on ranks 0, 2, 0.5 on rank 1",
            lambda: gradclip.adaptive_grad_clip_(params, **{name: 0.5 if HERE else 0.25}),  # noqa: B023
            params,
            told=True,
        )


def thresholds_that_differ_far_down():
    params = sharded(20)
    each = [1.0] * 20
    each[15] += HERE
    refused_by_all(
        ValueError, "20 in all, checksum", lambda: gradclip.clip_grad_layer_norm_(params, each), params, told=True
    )


def another_function():
    params = sharded()
    refused_by_all(
        ValueError,
        "function is clip_grad_layer_norm_ on ranks 0, 2, clip_grad_unit_norm_ on rank 1",
        lambda: CALLS[HERE](params, 1.0),
        params,
        told=True,
    )


def fewer_parameters():
    params = sharded(3)
    for call in CALLS:
        refused_by_all(
            ValueError,
            "passed different",
            lambda: call(params[: 3 - HERE], 1.0),  # noqa: B023
            params,
            told=True,
        )


def units_of_other_shapes():
    for call in CALLS[1:]:
        p = parameter(numbers(3 + HERE, 2, seed=dist.get_rank()))
        refused_by_all(
            ValueError,
            "passed different",
            lambda: call([p], 1.0, process_group=dist.group.WORLD),  # noqa: B023
            [p],
            told=True,
        )


def one_row_on_each_process():
    """Parts of one row, or rows of their own? Under a process group, only the axis of the units says so."""
    words = r"parameters\[0\].*shape \(1, 2\) on each process.* leave process_group and mesh out.* pass unit_axis="
    for call in CALLS[1:]:
        p = parameter(numbers(1, 2, seed=dist.get_rank()))
        for options in ({"process_group": dist.group.WORLD}, {"mesh": mesh()}):
            refused_by_all(ValueError, words, lambda: call([p], 1.0, **options), [p], told=True)  # noqa: B023
    row = np.full((1, 2), 1.0 + dist.get_rank())
    with pytest.raises(ValueError, match=r"has shape \(1, 2\) on each process"):
        gradclip.clip_grad_unit_norm_({"w": row}, 1.0, process_group=dist.group.WORLD)
    assert row.tolist() == [[1.0 + dist.get_rank()] * 2]
    norms = gradclip.clip_grad_unit_norm_({"w": row}, 1.0, unit_axis=0, process_group=dist.group.WORLD)
    whole = math.sqrt(2.0 * sum(rank**2 for rank in range(1, WORLD + 1)))
    assert norms["w"].tolist() == pytest.approx([whole])
    np.testing.assert_allclose(row, np.full((1, 2), (1.0 + dist.get_rank()) / whole))


def not_finite_on_one():
    for call in CALLS:
        for axis in (0, 1):
            params = [parameter(numbers(WORLD, 2 * WORLD, seed=seed), mesh(), [Shard(axis)]) for seed in range(2)]
            if HERE:
                params[1].grad.to_local()[0, 0] = math.nan
            refused_by_all(
                FloatingPointError,
                rf"rank {WRONG}: parameters\[1\].grad: 1 NaN",
                lambda: call(params, 1.0, nonfinite="raise"),  # noqa: B023
                params[:1],
                told=True,
            )


def replicas_under_a_process_group():
    for call in CALLS:
        params = [parameter(numbers(3, 2, seed=1)), parameter(numbers(4, seed=2))]
        refused_by_all(
            ValueError,
            "the same to the last bit",
            lambda: call(params, 1.0, process_group=dist.group.WORLD),  # noqa: B023
            params,
            told=True,
        )


def flat_shards_show_no_units():
    p = parameter(numbers(3, seed=dist.get_rank()))
    p._fsdp_flattened = True
    for call in CALLS:
        with pytest.raises(ValueError, match="FSDP1"):
            call([p], 1.0)
    with pytest.raises(ValueError, match="does not show its units"):
        gradclip.clip_grad_unit_norm_([p], 1.0, process_group=dist.group.WORLD)
    gradclip.clip_grad_layer_norm_([p], 1.0, process_group=dist.group.WORLD)


def groups_that_are_none():
    for call in CALLS:
        params = [parameter(numbers(3, seed=dist.get_rank()))]
        with pytest.raises(TypeError, match="process_group and mesh take"):
            call(params, 1.0, process_group="dp")


if __name__ == "__main__":
    run_all(globals())
