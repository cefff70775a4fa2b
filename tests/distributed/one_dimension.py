"""Cases on meshes of one dimension, and with process groups named by hand."""

import itertools
import math
import os
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip import clip_at_step
from gradients import (
    ORDERS,
    check,
    check_all,
    close,
    holder,
    numbers,
    on_one_process,
    parameter,
    same_everywhere,
    unseen,
)
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def mesh():
    return init_device_mesh("cpu", (WORLD,))


def orders_and_dtypes():
    m = mesh()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for ord in ORDERS:
            full = [numbers(8, 6, seed=1, dtype=dtype), numbers(12, seed=2, dtype=dtype)]
            check_all([parameter(x, m, [Shard(0)]) for x in full], full, ord)


def complex_numbers():
    m = mesh()
    full = [torch.complex(numbers(8, 3, seed=1), numbers(8, 3, seed=2))]
    for ord in ORDERS:
        parameters = [parameter(x, m, [Shard(0)]) for x in full]
        expected, _ = on_one_process(full, math.inf, ord)
        close(gradclip.clip_grad_norm_(parameters, 1.0, ord), expected)


def placements():
    m = mesh()
    full = [numbers(6, 8, seed=seed) for seed in range(4)]
    laid = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]
    for ord in ORDERS:
        parameters = [parameter(x, m, p, like=[Shard(0)]) for x, p in zip(full, laid, strict=True)]
        check_all(parameters, full, ord)
        assert [p.grad.placements for p in parameters] == [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(0),)]


def uneven_and_empty_shards():
    m = mesh()
    full = [numbers(5, 3, seed=1), numbers(1, 4, seed=2), numbers(0, 4, seed=3), numbers(seed=4).reshape(1)]
    for ord in ORDERS:
        check_all([parameter(x, m, [Shard(0)]) for x in full], full, ord)


def only_empty_shards():
    parameters = [parameter(numbers(0, 4), mesh(), [Shard(0)])]
    for ord in ORDERS:
        assert gradclip.clip_grad_norm_(parameters, 1.0, ord).item() == 0.0


def not_clipped_means_not_written():
    full = [numbers(6, 4, seed=1)]
    parameters = [parameter(x, mesh(), [Shard(0)]) for x in full]
    grad, version = parameters[0].grad, parameters[0].grad.to_local()._version
    check_all(parameters, full, share=2.0)
    assert parameters[0].grad is grad
    assert grad.to_local()._version == version


def no_gradients():
    parameters = [parameter(numbers(4, seed=1), mesh(), [Shard(0)]) for _ in range(2)]
    full = [numbers(4, seed=1)]
    parameters[0].grad = None
    check([*parameters], full)
    parameters[1].grad = None
    plain = {"process_group": dist.group.WORLD}
    for given, options in ((parameters, {}), ([torch.nn.Parameter(torch.ones(2, 2))], plain)):
        for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_):
            with pytest.warns(UserWarning, match="no parameter has a gradient"):
                call(given, 1.0, **options)
        with pytest.warns(UserWarning, match="no parameter has a gradient"):
            assert gradclip.grad_norm(given, **options).item() == 0.0
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        gradclip.clip_grad_norm_([{"params": parameters, "max_norm": 1.0}], 1.0)


def steps_without_gradients_say_nothing():
    parameters = [parameter(numbers(4, seed=1), mesh(), [Shard(0)]) for _ in range(2)]
    for p in parameters:
        p.grad = None
    for fused in (False, True):
        optimizer = torch.optim.AdamW(parameters, fused=fused)
        clipping, watched = clip_at_step(optimizer, 1.0), gradclip.guard(optimizer, 1.0)
        optimizer.step()
        assert (float(clipping.norm), watched.norm) == (0.0, 0.0)
        clipping.remove()
        watched.remove()


def gradients_of_zero_say_nothing():
    p = parameter(torch.zeros(2 * WORLD), mesh(), [Shard(0)])
    assert gradclip.clip_grad_norm_([p], 1.0).item() == 0.0


def no_gradient_on_one_process():
    full = numbers(2 * WORLD, seed=1)
    p = parameter(full, mesh(), [Shard(0)])
    if dist.get_rank() == WORLD - 1:
        p.grad = None
    norm = gradclip.clip_grad_norm_([p], 1.0)
    same_everywhere(norm)
    close(norm, gradclip.grad_norm([holder(full[:-2])]))


def float64_beside_halves():
    full = [numbers(16, 20, seed=1, dtype=torch.bfloat16), numbers(2 * WORLD, seed=2, dtype=torch.float64)]
    without = full[1].clone()
    without[-2:] = 0
    for replicated, expected in ((True, full), (False, [full[0], without])):
        parameters = [
            parameter(full[0], mesh(), [Shard(0)]),
            parameter(full[1], *[] if replicated else [mesh(), [Shard(0)]]),
        ]
        if not replicated and dist.get_rank() == WORLD - 1:
            parameters[1].grad = None
        norm, (_, clipped) = on_one_process(expected, 0.125)
        close(gradclip.clip_grad_norm_(parameters, 0.125), norm)
        if replicated:
            close(parameters[1].grad, clipped)
        elif parameters[1].grad is not None:
            close(parameters[1].grad.to_local(), clipped.chunk(WORLD)[dist.get_rank()])


def float64_that_another_process_holds():
    halves, wide = numbers(64, 64, seed=1, dtype=torch.bfloat16), numbers(3, seed=2, dtype=torch.float64)
    own = holder(wide if dist.get_rank() == 0 else halves.clone() * 2.0 ** dist.get_rank())
    held = [wide, *(halves * 2.0**rank for rank in range(1, WORLD))]
    exact = math.sqrt(sum(Fraction(v) ** 2 for x in held for v in x.double().flatten().tolist()))
    norm = gradclip.grad_norm([own], process_group=dist.group.WORLD)
    assert abs(float(norm) / exact - 1) < 1e-14


def tied_gradients():
    full = numbers(8, seed=1)
    p = parameter(full, mesh(), [Shard(0)])
    clipped = check([p, p, holder(p.grad)], [full, full])
    close(p.grad.full_tensor(), clipped[0])


def plain_tensors_count_once():
    full = [numbers(8, seed=1), numbers(3, seed=2, dtype=torch.float64), numbers(4, seed=3, dtype=torch.bfloat16)]
    for ord in ORDERS:
        parameters = [parameter(full[0], mesh(), [Shard(0)]), parameter(full[1]), parameter(full[2])]
        norm, _ = on_one_process(full, math.inf, ord)
        found = gradclip.clip_grad_norm_(parameters, norm.item() / 2, ord)
        same_everywhere(found)
        close(found, norm)


def any_magnitude():
    for scale in (1e-30, 1e30):
        full = [numbers(8, seed=1, scale=scale), numbers(8, seed=2, dtype=torch.float64, scale=scale**9)]
        for dtype in (torch.float32, torch.float64):
            some = [x for x in full if x.dtype is dtype]
            for ord in (1, 2, 3):
                check_all([parameter(x, mesh(), [Shard(0)]) for x in some], some, ord)


def by_hand():
    parts = numbers(3 * WORLD, seed=1)
    rank = dist.get_rank()
    for ord in ORDERS:
        p = parameter(parts[3 * rank : 3 * rank + 3])
        clipped = check([p], [parts], ord, process_group=dist.group.WORLD)
        close(p.grad, clipped[0][3 * rank : 3 * rank + 3], ord)
        q = parameter(parts[3 * rank : 3 * rank + 3])
        check([q], [parts], ord, mesh=mesh())
        assert torch.equal(p.grad, q.grad)


def stages_with_other_layers():
    """Each process has other layers, of other dtypes, and the last has none."""
    rank = dist.get_rank()
    layers = [[numbers(2 + r, seed=r, dtype=(torch.float32, torch.float64)[r % 2])] for r in range(WORLD - 1)] + [[]]
    full = [x for layer in layers for x in layer]
    for ord in ORDERS:
        mine = [parameter(x) for x in layers[rank]]
        clipped = check(mine, full, ord, process_group=dist.group.WORLD)
        if rank < WORLD - 1:
            close(mine[0].grad, clipped[rank], ord)


def raise_raises_in_every_stage():
    """The second process has the NaN; the others hold plain gradients of their own, or none."""
    rank = dist.get_rank()
    p = parameter(torch.tensor([1.0, math.nan if rank == 1 else 2.0]))
    for parameters in ([p], [p] if rank else []):
        with pytest.raises(FloatingPointError, match=r"in 1 leaf: rank 1: parameters\[0\].grad: 1 NaN, 0 infinite"):
            gradclip.clip_grad_norm_(iter([*parameters, parameter(torch.ones(0))]), 1.0, nonfinite="raise", mesh=mesh())
    assert p.grad[0] == 1.0


def frozen_parameters_say_nothing():
    """Of a model that is trained in part, the layers that are frozen have no gradient on any process."""
    full = numbers(8, seed=1)
    frozen = torch.nn.Parameter(distribute_tensor(numbers(6, seed=2), mesh(), [Shard(0)]), requires_grad=False)
    alone = torch.nn.Parameter(numbers(3, seed=3), requires_grad=False)
    trained = parameter(full, mesh(), [Shard(0)])
    clipped = check([frozen, trained, alone], [full])
    close(trained.grad.full_tensor(), clipped[0])
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        assert gradclip.grad_norm([frozen, alone]).item() == 0.0
    assert frozen.grad is None


def a_group_within_the_mesh_says_nothing_new():
    full = [numbers(8, seed=1), numbers(8, seed=2)]
    laid = [[Shard(0)], [Replicate()]]
    parameters = [parameter(x, mesh(), p) for x, p in zip(full, laid, strict=True)]
    check_all(parameters, full, process_group=dist.group.WORLD)


def where_nothing_is_looked_at():
    full = [numbers(5, 3, seed=1), numbers(4, seed=2, dtype=torch.float64), numbers(6, seed=3, dtype=torch.bfloat16)]
    laid = [[Shard(0)], [Replicate()], [Shard(0)]]
    for ord in ORDERS:
        for bad, nonfinite in ((1.0, "propagate"), (math.nan, "propagate"), (math.inf, "zero"), (math.nan, "drop")):
            full[0][3, 1] = bad
            with unseen():
                check_all(
                    [parameter(x, mesh(), p) for x, p in zip(full, laid, strict=True)], full, ord, nonfinite=nonfinite
                )


def few_operations_where_nothing_is_looked_at():
    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    for dtype, threshold in itertools.product((torch.float32, torch.float16), (1.0, 2.0**-12, torch.tensor(2.0**-12))):
        found = []
        for count in (2, 2, 40):  # the first call may make what later ones keep
            full = [numbers(2 * WORLD, seed=i, dtype=dtype) for i in range(count)]
            parameters = [parameter(x, mesh(), [Shard(0)]) for x in full]
            with unseen(), Count() as counted:
                gradclip.clip_grad_norm_(parameters, threshold)
            found.append(counted.operations)
            whole = [p.grad.full_tensor().double() for p in parameters]
            power = sum(Fraction(v) ** 2 for x in whole for v in x.tolist())
            assert power <= Fraction(float(threshold)) ** 2
            assert power >= (0.98 * float(threshold)) ** 2
        assert found[1] == found[2] <= 200, found


def raise_where_nothing_else_is_looked_at():
    x = numbers(8, seed=1)
    x[7] = math.nan
    p = parameter(x, mesh(), [Shard(0)])
    with unseen(), pytest.raises(FloatingPointError, match=rf"in 1 leaf: rank {WORLD - 1}: .* 1 NaN"):
        gradclip.clip_grad_norm_([p], 1.0, nonfinite="raise")


def a_mistake_that_nobody_looks_at():
    """The process whose gradient is wrong raises; for the others all is NaN."""
    for nonfinite, others in (("propagate", math.nan), ("zero", math.nan), ("drop", 0.0)):
        p = parameter(numbers(WORLD, seed=1), mesh(), [Shard(0)])
        wrong = holder(torch.ones(2, dtype=torch.int64 if dist.get_rank() == 0 else torch.float32))
        with unseen():
            if dist.get_rank() == 0:
                with pytest.raises(TypeError, match="int64"):
                    gradclip.clip_grad_norm_([p, wrong], 1.0, nonfinite=nonfinite)
            else:
                assert math.isnan(gradclip.clip_grad_norm_([p, wrong], 1.0, nonfinite=nonfinite))
                assert p.grad.to_local().isnan().all() if math.isnan(others) else not p.grad.to_local().any()


def high_orders_are_refused():
    p = parameter(numbers(8, seed=1), mesh(), [Shard(0)])
    with pytest.raises(ValueError, match="at most 8, inf or -inf"):
        gradclip.clip_grad_norm_([p], 1.0, 9)


if __name__ == "__main__":
    run_all(globals())
