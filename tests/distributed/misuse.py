"""Calls that do not go together on all processes: each of them ends with an error that says where they differ."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import gradclip
from gradients import check, check_all, close, numbers, on_one_process, parameter, refused, same_everywhere, unseen
from meshes import line, mesh
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def layouts():
    """Return parameters and options of calls on shards, on stages, and on gradients that are split in two ways."""
    rank = dist.get_rank()
    split = [parameter(numbers(8, seed=1), line(), [Shard(0)])]
    stage = [parameter(numbers(3, seed=rank))]
    both = [parameter(numbers(8, 4, seed=2), mesh(), [Shard(0), Shard(1)]), parameter(numbers(4, seed=3))]
    return [(split, {}), (stage, {"process_group": dist.group.WORLD}), (both, {})]


def thresholds_that_differ():
    rank = dist.get_rank()
    for parameters, options in layouts():
        refused(
            ValueError, r"max_norm is 1.0 on ranks 0, 2, 3, 2.0 on rank 1", parameters, 1.0 + (rank == 1), **options
        )
        everyone = r"max_norm is 1.0 on rank 0, 2.0 on rank 1, 3.0 on rank 2, 4.0 on rank 3"
        for make in (float, torch.tensor, np.float32):
            refused(ValueError, everyone, parameters, make(1 + rank), **options)
        for near in (math.nextafter(1.0, 2.0), math.inf):
            refused(ValueError, "max_norm is .* on rank 3", parameters, near if rank == 3 else 1.0, **options)
        refused(ValueError, r"max_norm is .* 0.0 on rank 2", parameters, 0 if rank == 2 else 1.0, 3, **options)


def the_same_threshold_in_other_words():
    for parameters, options in layouts():
        max_norm = [1, 1.0, torch.tensor(1.0), np.float32(1)][dist.get_rank()]
        same_everywhere(gradclip.clip_grad_norm_(parameters, max_norm, **options))


def policies_that_differ():
    for parameters, options in layouts():
        for one, others in (("zero", "propagate"), ("raise", "drop"), ("propagate", "raise")):
            words = f"nonfinite is '{one}' on rank 0, '{others}' on ranks 1, 2, 3"
            nonfinite = one if dist.get_rank() == 0 else others
            refused(ValueError, words, parameters, 1.0, nonfinite=nonfinite, **options)


def orders_that_differ():
    """Vectors of other lengths, of which some processes take sums and others the largest."""
    for parameters, options in layouts():
        for one, others in (
            (1, 2),
            (2, 3),
            (8, 2),
            (2, 8),
            (math.inf, 2),
            (2, math.inf),
            (math.inf, -math.inf),
            (3, 1.5),
        ):
            words = rf"ord is {float(others)} on ranks 0, 1, 2, {float(one)} on rank 3"
            refused(ValueError, words, parameters, 1.0, one if dist.get_rank() == 3 else others, **options)
        everyone = "ord is 1.0 on rank 0, 2.0 on rank 1, inf on rank 2, 3.0 on rank 3"
        refused(ValueError, everyone, parameters, 1.0, [1, 2, math.inf, 3][dist.get_rank()], **options)


def a_norm_here_and_a_clip_there():
    call = gradclip.grad_norm if dist.get_rank() == 0 else (lambda p, **o: gradclip.clip_grad_norm_(p, 1.0, **o))
    for parameters, options in layouts():
        words = r"max_norm is not given \(grad_norm\) on rank 0, 1.0 on ranks 1, 2, 3"
        refused(ValueError, words, parameters, call=call, **options)


def arguments_that_are_wrong_on_one_process():
    rank = dist.get_rank()
    wrong = [
        ((-1.0,), {}, ValueError, "max_norm must not be negative or NaN, got -1.0"),
        ((torch.tensor(-1.0),), {}, ValueError, "max_norm must not be negative"),
        ((math.nan,), {}, ValueError, "max_norm must not be negative or NaN"),
        (("1",), {}, TypeError, "max_norm must be a real number"),
        ((1.0, 0.5), {}, ValueError, "ord must be a number >= 1"),
        ((1.0, 9), {}, ValueError, "ord must be at most 8"),
        ((1.0, 9), {"nonfinite": "zero"}, ValueError, "ord must be at most 8"),
        ((1.0,), {"nonfinite": "no"}, ValueError, "nonfinite must be one of"),
    ]
    for parameters, options in layouts():
        for right in (2, 3, math.inf):
            for arguments, more, kind, words in wrong:
                if rank == 1:
                    refused(kind, words, parameters, *arguments, **more, **options)
                else:
                    told = f"rank 1: {kind.__name__}: {words}"
                    refused(RuntimeError, told, parameters, 1.0, right, **options)


def parameters_that_are_wrong_on_one_process():
    named = {"process_group": dist.group.WORLD}
    for bad, kind in (
        ((), None),
        (iter(()), ValueError),
        ((p for p in ()), ValueError),
        (3, TypeError),
        ([object()], TypeError),
    ):
        if kind is None:
            p = parameter(numbers(3, seed=dist.get_rank()))
            norm = gradclip.clip_grad_norm_(bad if dist.get_rank() == 2 else [p], 1.0, **named)
            same_everywhere(norm)
        elif dist.get_rank() == 2:
            with pytest.raises(kind):
                gradclip.clip_grad_norm_(bad, 1.0, **named)
        else:
            refused(RuntimeError, f"rank 2: {kind.__name__}", [parameter(numbers(3))], 1.0, **named)


def what_is_no_process_group():
    p = parameter(numbers(3))
    for wrong in ("dp", 3, 1.5, {"dp"}, object(), torch.ones(1), frozenset(), len):
        for options in ({"process_group": wrong}, {"mesh": wrong}, {"process_group": [wrong]}):
            words = f"got .* of type {type(wrong).__name__}"
            refused(TypeError, words, [p], 1.0, **options)
            refused(TypeError, words, [p], call=gradclip.grad_norm, **options)
            with pytest.raises(TypeError, match=words):
                gradclip.clip_grad_norm_([{"params": [p], **options}], 1.0)
    array = {"w": np.ones(2)}
    with pytest.raises(TypeError, match="of type str"):
        gradclip.clip_grad_norm_(array, 1.0, process_group="dp")


def what_is_no_process_group_on_one_process():
    """The others hear of it through the groups that all of them know."""
    p = parameter(numbers(8, seed=1), line(), [Shard(0)])
    if dist.get_rank() == 1:
        refused(TypeError, "got 'dp' of type str", [p], 1.0, process_group="dp")
    else:
        refused(RuntimeError, "rank 1: TypeError: process_group and mesh take", [p], 1.0)


def groups_of_others():
    rank, p = dist.get_rank(), parameter(numbers(3, seed=dist.get_rank()))
    some = dist.new_group([1, 2, 3])
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    submesh = [dist.DeviceMesh("cpu", [0, 1]), dist.DeviceMesh("cpu", [2, 3])]
    assert pair.size() == 4
    if rank == 0:
        refused(ValueError, "rank 0, is not in it", [p], 1.0, process_group=some)
    else:
        alone, _ = on_one_process([numbers(3, seed=seed) for seed in (1, 2, 3)], 1.0)
        close(gradclip.clip_grad_norm_([p], 1.0, process_group=some), alone)
    refused(ValueError, f"rank {rank}, is not in it", [p], 1.0, mesh=submesh[rank < 2])
    for options in ({"process_group": some}, {"process_group": [None, some]}):
        q = parameter(numbers(8, seed=1), line(), [Shard(0)])
        if options["process_group"] != some:
            refused(TypeError, "of type NoneType", [q], 1.0, **options)
        elif rank == 0:
            refused(ValueError, "GroupMember.NON_GROUP_MEMBER", [q], 1.0, **options)
        else:
            refused(RuntimeError, "rank 0: ValueError: process_group or mesh is GroupMember", [q], 1.0, **options)


def parameter_groups_in_another_order():
    """Which group of parameters comes first does not matter, so that each process may list its own."""
    tp, dp, rank = mesh()["tp"], mesh()["dp"], dist.get_rank()
    full = [numbers(2, 6, seed=1), numbers(2, 5, seed=2), numbers(2, 2, 3, seed=3), numbers(4, seed=4)]
    at = [tp.get_local_rank(), dp.get_local_rank()]

    def groups():
        return [
            {"params": [parameter(full[0][at[0]])], "mesh": tp},
            {"params": [parameter(full[1][at[1]])], "process_group": dp.get_group()},
            {"params": [parameter(full[2][at[1]][at[0]])], "mesh": [tp, dp]},
            {"params": [parameter(full[3])]},
        ]

    for ord in (1, 2, 3, math.inf):
        check(groups()[rank:] + groups()[:rank], full, ord)
        check(groups()[::-1] if rank % 2 else groups(), full, ord)


def groups_named_in_another_order():
    tp, dp = mesh()["tp"], mesh()["dp"]
    p = parameter(numbers(3, seed=dist.get_rank()))
    for rank in range(WORLD):
        named = [tp, dp] if dist.get_rank() == rank else [dp, tp]
        words = f"process groups .* or their order, differ: .*rank {rank} splits over ranks"
        refused(ValueError, words, [p], 1.0, mesh=named)


def a_group_that_is_named_by_some():
    """For these a plain gradient is theirs, for the others it is the same everywhere."""
    square, laid = mesh(), [Shard(0), Shard(1)]
    for shards, placements, named in ((square, laid, square["tp"]), (square, laid, square), (line(), laid[:1], line())):
        for rank in range(WORLD):
            first, second = parameter(numbers(8, 4, seed=2), shards, placements), parameter(numbers(4, seed=3))
            options = {"mesh": named} if dist.get_rank() == rank else {}
            with pytest.raises(ValueError, match="the process groups over which gradients are split"):
                gradclip.clip_grad_norm_([{"params": [first]}, {"params": [second], **options}], 1.0)


def more_than_one_vector_holds():
    """Of the order 8 one split takes all of a vector, so that two need another."""
    kinds = [Shard(0), Shard(1), Replicate(), Partial()]
    for ord in (3, 8, math.inf):
        pairs = [(first, second) for first in kinds for second in kinds]
        full = [numbers(6, 5, seed=seed) for seed in range(len(pairs))]
        made = [parameter(x, mesh(), pair, like=[Shard(0), Shard(1)]) for x, pair in zip(full, pairs, strict=True)]
        check_all(made, full, ord)
    refused(ValueError, "ord is 2.0 on rank 0, 8.0 on ranks", made, 1.0, 2 if dist.get_rank() == 0 else 8)


def differences_that_nobody_looks_at():
    rank = dist.get_rank()
    for arguments, options in (
        ((1.0 + (rank == 3),), {}),
        ((1.0, 1 + (rank == 0)), {}),
        ((1.0, (2, 2, 2, math.inf)[rank]), {}),
        ((1.0,), {"nonfinite": "propagate" if rank else "drop"}),
    ):
        p = parameter(numbers(8, seed=1), line(), [Shard(0)])
        with unseen():
            assert math.isnan(gradclip.clip_grad_norm_([p], *arguments, **options))
        assert p.grad.to_local().isnan().all() or (options and not rank and not p.grad.to_local().any())


def a_difference_that_is_looked_at_for_raise():
    p = parameter(numbers(8, seed=1), line(), [Shard(0)])
    with unseen(), pytest.raises(ValueError, match="passed different arguments"):
        gradclip.clip_grad_norm_([p], 1.0 + dist.get_rank(), nonfinite="raise")


def an_empty_list_warns():
    for call in (gradclip.grad_norm, lambda p, **o: gradclip.clip_grad_norm_(p, 1.0, **o)):
        with pytest.warns(RuntimeWarning, match=f"rank {dist.get_rank()}, passes no parameters"):
            assert call([]) == 0.0
        assert call([], process_group=[]) == 0.0
        assert call([], process_group=dist.group.WORLD) == 0.0
        with pytest.warns(UserWarning, match="no parameter has a gradient"):
            assert call([SimpleNamespace(grad=None)]) == 0.0


if __name__ == "__main__":
    run_all(globals())
