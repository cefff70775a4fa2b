"""Cases in which layers and units are clipped by norms that processes share, beside one process."""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import gradclip
from gradients import ORDERS, numbers, parameter, unseen
from layerwise import CALLS, by_layer, by_unit, close, compare
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
PLACEMENTS = ([Shard(0)], [Shard(1)], [Replicate()], [Partial()])


def mesh():
    return init_device_mesh("cpu", (WORLD,))


def every_placement(shape, dtype=torch.float32):
    full = [numbers(*shape, seed=seed, dtype=dtype) for seed in range(4)]
    laid = zip(full, PLACEMENTS, strict=True)
    return [parameter(x, mesh(), p, like=[Shard(0)]) for x, p in laid], full


def placements_and_orders():
    for call in CALLS:
        for ord in ORDERS:
            compare(call, *every_placement((6, 4)), ord=ord)


def dtypes():
    for call in CALLS:
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            compare(call, *every_placement((6, 4), dtype))


def complex_numbers():
    full = [torch.complex(numbers(4, 3, seed=1), numbers(4, 3, seed=2))]
    for call in (by_layer, by_unit):
        for p in PLACEMENTS[:3]:
            compare(call, [parameter(x, mesh(), p) for x in full], full)


def beyond_the_range_of_squares():
    for scale in (1e200, 1e-200):
        full = [numbers(6, 4, seed=1, dtype=torch.float64, scale=scale)]
        for call in (by_layer, by_unit):
            for p in PLACEMENTS[:3]:
                compare(call, [parameter(x, mesh(), p) for x in full], full, max_norm=2 * scale)


def uneven_and_empty_shards():
    full = [numbers(5, 3, seed=1), numbers(1, 4, seed=2), numbers(0, 4, seed=3), numbers(3, seed=4)]
    for call in CALLS:
        for ord in ORDERS:
            for axis in (0, 1):
                laid = [[Shard(min(axis, x.ndim - 1))] for x in full]
                compare(call, [parameter(x, mesh(), p) for x, p in zip(full, laid, strict=True)], full, ord=ord)


def other_axes_index_the_units():
    full = [numbers(4, 6, 2, seed=1), numbers(6, 4, seed=2)]
    for unit_axis in (-1, 1, (0, 1), 0):
        for axis in (0, 1):
            params = [parameter(x, mesh(), [Shard(axis)]) for x in full]
            compare(by_unit, params, full, unit_axis=unit_axis)


def mixed_with_plain_tensors():
    full = [numbers(4, 6, seed=1), numbers(3, 2, seed=2), numbers(4, seed=3), numbers(2, 2, seed=4)]
    for call in CALLS:
        params = [
            parameter(full[0], mesh(), [Shard(0)]),
            parameter(full[1]),
            parameter(full[2], mesh(), [Replicate()]),
            parameter(full[3], mesh(), [Shard(1)]),
        ]
        compare(call, params, full)


def named_processes():
    """Each process has a part of every gradient, and of every row."""
    full = [numbers(4, 2 * WORLD, seed=1), numbers(2 * WORLD, seed=2)]
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for call in CALLS:
        for options in ({"process_group": dist.group.WORLD}, {"mesh": mesh()}):
            params = [torch.nn.Parameter(torch.zeros(4, 2)), torch.nn.Parameter(torch.zeros(2))]
            params[0].grad, params[1].grad = full[0][:, mine].clone(), full[1][mine].clone()
            compare(call, params, full, part=mine, **options)


def a_gradient_that_one_process_lacks():
    """The last process has no gradient of the second parameter, but its share of the weights."""
    full = [numbers(4, 2 * WORLD, seed=1), numbers(3, 2 * WORLD, seed=2), numbers(2 * WORLD, seed=3)]
    known = [full[0], full[1].clone(), full[2]]
    known[1][:, -2:] = 0
    lacking = {1} if dist.get_rank() == WORLD - 1 else ()
    for call in CALLS:
        for ord in (1, 2, math.inf):
            params = [parameter(x, mesh(), [Shard(x.ndim - 1)]) for x in full]
            for number in lacking:
                params[number].grad = None
            compare(call, params, known, ord=ord, lacking=lacking, weights_of=full)
    p = parameter(full[1], mesh(), [Shard(1)])
    p.grad = None if lacking else p.grad
    for call, expected in ((by_layer, full[1][:, :-2].abs().min()), (by_unit, full[1][:, :-2].abs().amin(1))):
        (norm,) = call([p], math.inf, -math.inf)
        assert norm is None if lacking else torch.equal(norm, expected)


def one_reduction_for_all():
    for call in CALLS:
        for count in (1, 3, 100):
            params = [parameter(numbers(4, 2, seed=seed), mesh(), [Shard(seed % 2)]) for seed in range(count)]
            with CommDebugMode() as counted:
                call(params, 1.0)
            assert counted.get_total_counts() == 1, counted.get_comm_counts()


def a_reduction_more_for_what_does_not_fit():
    params = [parameter(numbers(2, seed=seed), mesh(), [Shard(0)]) for seed in range(700)]
    full = [numbers(2, seed=seed) for seed in range(700)]
    with CommDebugMode() as counted:
        norms = gradclip.clip_grad_layer_norm_(params, 1.0)
    assert counted.get_total_counts() == 2
    for norm, x in zip(norms, full, strict=True):
        close(norm, torch.linalg.vector_norm(x))


def norms_at_the_threshold():
    """The row (3, 4) has exactly the norm 5, and all elements that of the square root of 125, between two floats."""
    full = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    for axis in (0, 1):
        p = parameter(full, mesh(), [Shard(axis)])
        gradclip.clip_grad_unit_norm_([p], 5.0)
        found = p.grad.full_tensor()
        assert torch.equal(found[0], full[0])
        close(found[1], full[1] / 2)
        for max_norm in (125.0**0.5, math.nextafter(125.0**0.5, 0), math.nextafter(125.0**0.5, 12)):
            p = parameter(full, mesh(), [Shard(axis)])
            gradclip.clip_grad_layer_norm_([p], max_norm)
            assert torch.equal(p.grad.full_tensor(), full) == gradclip.norm_at_most([full], max_norm)


def thresholds_of_their_own():
    full = [numbers(4, 2, seed=1), numbers(4, 2, seed=2), numbers(4, 2, seed=3)]
    for call in (by_layer, by_unit):
        params = [parameter(x, mesh(), [Shard(i % 2)]) for i, x in enumerate(full)]
        compare(call, params, full, max_norm=[1.0, 100.0, 0.0])


def a_parameter_listed_twice():
    full = numbers(4, 2, seed=1)
    for call in CALLS:
        p = parameter(full, mesh(), [Shard(1)])
        first, second = call([p, p], 2.0)
        assert torch.equal(first, second)
        q = torch.nn.Parameter(torch.zeros_like(full))
        q.grad = full.clone()
        call([q], 2.0)
        close(p.grad.full_tensor(), q.grad)


def shards_in_one_memory():
    """Two parameters share a gradient: each is scaled by its own threshold, in memory of its own."""
    p, q = (parameter(numbers(4, 2, seed=1), mesh(), [Shard(0)]) for _ in range(2))
    q.grad = p.grad
    whole = p.grad.full_tensor().clone()
    norms = gradclip.clip_grad_layer_norm_([p, q], [1.0, 2.0])
    for one, norm, max_norm in zip((p, q), norms, (1.0, 2.0), strict=True):
        close(one.grad.full_tensor(), whole * (max_norm / norm))


def nonfinite_policies():
    for call in CALLS:
        for policy in ("propagate", "zero", "drop"):
            for axis in (0, 1):
                full = [numbers(4, 2 * WORLD, seed=1), numbers(4, 2 * WORLD, seed=2)]
                full[0][-1, -1], full[1][0, 0] = math.nan, math.inf
                params = [parameter(x, mesh(), [Shard(axis)]) for x in full]
                compare(call, params, full, nonfinite=policy, weights_of=[x.nan_to_num(1.0, 1.0) for x in full])


def as_on_accelerators():
    full = [numbers(4, 6, seed=1), numbers(3, 2, seed=2, dtype=torch.bfloat16), numbers(4, seed=3)]
    with unseen():
        for call in CALLS:
            for policy in ("propagate", "zero", "drop"):
                params = [
                    parameter(full[0], mesh(), [Shard(0)]),
                    parameter(full[1]),
                    parameter(full[2], mesh(), [Shard(0)]),
                ]
                with CommDebugMode() as counted:
                    compare(call, params, full, nonfinite=policy)
                assert counted.get_comm_counts()[torch.ops.c10d.allreduce_] == 1, counted.get_comm_counts()


def iterators_and_names():
    full = numbers(4, 2, seed=1)
    model = torch.nn.Linear(2, 4, bias=False)
    for given in (lambda p: iter([p]), lambda p: [("w", p)], lambda p: {"w": p}, lambda p: p):
        p = parameter(full, mesh(), [Shard(0)])
        (norm,) = gradclip.clip_grad_layer_norm_(given(p), 1.0)
        close(norm, torch.linalg.vector_norm(full))
    del model


if __name__ == "__main__":
    run_all(globals())
