"""Monitors of distributed gradients: the norm of each gradient, on the processes that have a monitor."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import gradclip
from gradients import numbers, parameter, unseen
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
FULL = {"w": numbers(4, 2 * WORLD, seed=1), "b": numbers(3, seed=2), "tiny": numbers(1, 2, seed=3)}


def named(scale=1.0):
    mesh = init_device_mesh("cpu", (WORLD,))
    laid = {"w": [Shard(1)], "b": [Replicate()], "tiny": [Shard(0)]}
    return {name: parameter(x * scale, mesh, laid[name]) for name, x in FULL.items()}


def expected(scale=1.0, **changed):
    return {name: pytest.approx(float(x.norm()) * scale) for name, x in (FULL | changed).items()}


def clipped(monitor, params, max_norm=1.0, **options):
    return gradclip.clip_grad_norm_(params, max_norm, monitor=monitor, **options)


def table(monitor):
    found = monitor.layers
    return dict(zip(found.names, found.norms[-1].tolist(), strict=True))


def layers_on_every_process():
    monitor = gradclip.Monitor(layers_every=1)
    for scale in (1.0, 3.0):
        params = named(scale)
        with CommDebugMode() as counted:
            norm = clipped(monitor, params)
        assert counted.get_total_counts() == 2, counted.get_comm_counts()
        assert torch.equal(norm, gradclip.grad_norm(named(scale)))
        assert table(monitor) == expected(scale)


def layers_on_one_process():
    """The others take part, although they have no monitor."""
    for rank in range(WORLD):
        monitor = gradclip.Monitor(layers_every=1) if rank == RANK else None
        clipped(monitor, named())
        if monitor is not None:
            assert table(monitor) == expected()


def layers_at_some_steps():
    monitor = gradclip.Monitor(layers_every=2, keep_spikes=0)
    counts = []
    for _ in range(4):
        params = named()
        with CommDebugMode() as counted:
            clipped(monitor, params)
        counts.append(counted.get_total_counts())
    assert counts == [2, 1, 2, 1]


def other_orders():
    for ord in (1, 3, math.inf):
        monitor = gradclip.Monitor(layers_every=1)
        clipped(monitor, named(), ord=ord)
        wanted = {name: pytest.approx(float(torch.linalg.vector_norm(x, ord))) for name, x in FULL.items()}
        assert table(monitor) == wanted


def a_gradient_that_one_process_lacks():
    monitor, params = gradclip.Monitor(layers_every=1), named()
    if RANK == WORLD - 1:
        params["w"].grad = None
    clipped(monitor, params)
    assert table(monitor) == expected(w=FULL["w"][:, :-2])


def gradients_that_no_process_has():
    monitor, params = gradclip.Monitor(layers_every=1), named()
    params["w"].grad = None
    clipped(monitor, params)
    assert table(monitor) == {name: norm for name, norm in expected().items() if name != "w"}


def spikes_name_the_layer():
    monitor = gradclip.Monitor()
    for step in range(30):
        clipped(monitor, named(1.0 + step % 3))
    params = named()
    params["w"].grad.to_local()[0, 0] = 1e5
    clipped(monitor, params)
    (spike,) = monitor.spikes
    assert "w" in str(spike)


def nonfinite_layers_are_named_where_the_call_raises():
    monitor, params = gradclip.Monitor(), named()
    if RANK == 0:
        params["w"].grad.to_local()[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="rank 0"):
        clipped(monitor, params, nonfinite="raise")
    (spike,) = monitor.spikes
    assert "w" in str(spike)


def zeroed_gradients_are_measured_once():
    monitor, params = gradclip.Monitor(layers_every=1), named()
    if RANK == 0:
        params["w"].grad.to_local()[0, 0] = math.inf
    with CommDebugMode() as counted:
        clipped(monitor, params, nonfinite="zero")
    assert counted.get_total_counts() == 3
    assert table(monitor)["w"] == math.inf


def named_processes_hold_other_layers():
    monitor = gradclip.Monitor(layers_every=1)
    clipped(monitor, [parameter(numbers(3, seed=RANK))], process_group=dist.group.WORLD)
    assert monitor.layers is None


def accelerators_leave_them_out():
    monitor = gradclip.Monitor(layers_every=1)
    with unseen():
        clipped(monitor, named())
    assert monitor.layers is None
    assert monitor.last.norm == pytest.approx(float(torch.cat([x.flatten() for x in FULL.values()]).norm()))


def weights_with_gradients(scale, placement=None):
    """The rows have the norms 3 and 4 or a multiple, and weights of the norms 6 and 1."""
    mesh, grads = init_device_mesh("cpu", (WORLD,)), torch.ones(2, 4 * WORLD) * torch.tensor([[1.5], [2.0]]) * scale
    p = parameter(grads / WORLD**0.5, *(() if placement is None else (mesh, placement)))
    rows = torch.tensor([[3.0], [0.5]]).expand(2, 4 * WORLD) / WORLD**0.5
    with torch.no_grad():
        p.copy_(rows if placement is None else torch.distributed.tensor.distribute_tensor(rows, mesh, placement))
    return [("w", p)]


def units_that_follow_their_weights():
    """On one process after the other, the others have no monitor."""
    for rank in range(WORLD):
        monitor = gradclip.Monitor() if rank == RANK else None
        for placement in ([Shard(1)], [Replicate()], None):
            gradclip.adaptive_grad_clip_(weights_with_gradients(1.0, placement), 0.5, monitor=monitor)
            with unseen():
                gradclip.adaptive_grad_clip_(weights_with_gradients(1.0, placement), 0.5, monitor=monitor)
        if monitor is not None:
            for step in monitor.records:
                assert (step.norm, step.max_norm) == (pytest.approx(4.0), pytest.approx(0.5))


if __name__ == "__main__":
    run_all(globals())
