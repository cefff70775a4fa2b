"""`where=` over processes: shards of what is chosen, stages of which one holds nothing of it, and what differs."""

import math
import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

import gradclip
from gradients import close, numbers, parameter, same_everywhere, unseen, whole
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def shards():
    x = numbers(8, 3, seed=1)
    spoiled = torch.full((4,), math.nan)
    mesh = init_device_mesh("cpu", (WORLD,))
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_):
        params = {
            "w": parameter(x, mesh, [Shard(0)]),
            "head": parameter(spoiled, mesh, [Shard(0)]),
        }
        alone = {"w": parameter(x)}
        found, expected = call(params, 0.5, where="w"), call(alone, 0.5)
        if isinstance(found, list):
            assert float(found[1]) == 0.0
            found, expected = found[0], expected[0]
        close(whole(found), expected)
        close(whole(params["w"].grad), alone["w"].grad)
        assert whole(params["head"].grad).isnan().all()


def stages_of_which_one_holds_nothing_of_it():
    own = {f"stage{RANK}.w": parameter(torch.tensor([3.0, 4.0]))}
    norm = gradclip.clip_grad_norm_(own, 1.0, where="stage0.*", process_group=dist.group.WORLD)
    same_everywhere(norm)
    assert norm == 5.0
    expected = torch.tensor([0.6, 0.8] if RANK == 0 else [3.0, 4.0])
    close(own[f"stage{RANK}.w"].grad, expected)
    assert gradclip.grad_norm(own, where="stage*", process_group=dist.group.WORLD) > 5.0


def nothing_on_any_process():
    own = {f"stage{RANK}.w": parameter(torch.tensor([3.0, 4.0]))}
    arrays = {name: one.grad.numpy() for name, one in own.items()}
    words = rf"chooses nothing on any process\. On this one, rank {RANK}: .*'head' matches none of stage{RANK}\.w\. Cor"
    processes = {"process_group": dist.group.WORLD}
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_):
        for where in ("head", ["head"], lambda _: False):
            expected = words.replace("'head'", "the function") if callable(where) else words
            for given in (own, arrays, [{"params": own}])[: 3 if call is gradclip.clip_grad_norm_ else 1]:
                with pytest.raises(ValueError, match=expected), CommDebugMode() as calls:
                    call(given, 0.0, where=where, **processes)
                assert calls.get_total_counts() == 1
    for wrong in ({"ord": math.inf}, {"max_norm": gradclip.AdaptiveThreshold()}, {"max_norm": {"*": 1.0}}):
        with pytest.raises(ValueError, match=words):
            gradclip.clip_grad_norm_(own, **{"max_norm": 0.0, **wrong}, where="head", **processes)
    with pytest.raises(ValueError, match=words):
        gradclip.grad_norm(own, where="head", **processes)
    with pytest.raises(ValueError, match=words):
        gradclip.clip_grad_norm_([{"params": own, **processes}], 0.0, where="head")
    with pytest.raises(ValueError, match="where chooses none of the names: 'head'"):
        gradclip.clip_grad_norm_(own, 0.0, where="head", process_group=[])
    with unseen():
        assert gradclip.clip_grad_norm_(own, 0.0, where="head", **processes).isnan()
        assert gradclip.clip_grad_norm_(own, 100.0, where="stage1.*", **processes) == 5.0
    assert own[f"stage{RANK}.w"].grad.tolist() == [3.0, 4.0]


def nothing_on_one_process_takes_no_more_reductions():
    own = {f"stage{RANK}.w": parameter(torch.tensor([3.0, 4.0 + RANK]))}
    for options in ({}, {"where": "stage1.*"}):
        with CommDebugMode() as calls:
            gradclip.clip_grad_norm_(own, 100.0, process_group=dist.group.WORLD, **options)
        assert calls.get_total_counts() == 1
    arrays = {f"stage{RANK}.w": np.array([3.0, 4.0])}
    assert gradclip.clip_grad_norm_(arrays, 0.0, where="stage1.*", process_group=dist.group.WORLD) == 5.0
    assert arrays[f"stage{RANK}.w"][0] == (3.0 if RANK == 0 else 0.0)
    own[f"stage{RANK}.w"].grad = None  # what is chosen may lack a gradient, and is still chosen
    with pytest.warns(UserWarning, match="no parameter that where chooses has a") if RANK else nullcontext():
        assert gradclip.clip_grad_norm_(own, 1.0, where="stage1.*", process_group=dist.group.WORLD) == 0.0


def errors_on_one_process():
    own = {"w": parameter(torch.tensor([3.0, 4.0]))}
    mistakes = {"where": 3 if RANK == 1 else "w"}, {"integers": "no" if RANK == 1 else "keep", "where": "w"}
    for call in (gradclip.clip_grad_norm_, gradclip.clip_grad_layer_norm_):
        for options in mistakes:
            kind, words = ((TypeError, ValueError), "must be") if RANK == 1 else (RuntimeError, "rank 1: .* must be")
            with pytest.raises(kind, match=words):
                call(own, 1.0, process_group=dist.group.WORLD, **options)
        with pytest.raises(
            ValueError, match=r"where is .*'w'.* on rank 0, .*'x'.* on rank 1|processes passed different"
        ):
            call(own, 1.0, process_group=dist.group.WORLD, where="w" if RANK == 0 else "x")
    assert own["w"].grad.tolist() == [3.0, 4.0]


if __name__ == "__main__":
    run_all(globals())
