"""Functions beside clip_grad_norm_ that take distributed tensors."""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import gradclip
from gradients import ORDERS, close, laid_out, numbers, parameter, same_everywhere
from worker import run_all

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def mesh():
    return init_device_mesh("cpu", (WORLD,))


def views_of_one_gradient_count_each():
    """Beside a gradient that is split, of which the norm is reduced apart from that of the others."""
    split, held = numbers(8, seed=1), numbers(2, 3, seed=2)
    p, q, again = parameter(split, mesh(), [Shard(0)]), parameter(held), parameter(held.T)
    again.grad = q.grad.T
    expected = torch.linalg.vector_norm(torch.cat([split, *[held.reshape(-1)] * 2]))
    for given in ([q, p, again], [again, p, q], [p, q, again, q]):
        close(gradclip.grad_norm(given), expected)
    norm = gradclip.clip_grad_norm_([again, p, q], 1.0)
    same_everywhere(norm)
    close(norm, expected)
    torch.testing.assert_close(p.grad.full_tensor(), split / norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(q.grad, held / norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(again.grad, held.T / norm, rtol=1e-6, atol=0)


def shards_in_one_memory_count_each():
    """Of a whole gradient and a row of it on each process: the norm is that of both, each shard is scaled once."""
    lying = numbers(6, 4, seed=3) + dist.get_rank()
    whole, row = (parameter(torch.zeros(size * WORLD, 4), mesh(), [Shard(0)]) for size in (6, 1))
    for call in (gradclip.clip_grad_norm_, lambda ps, c: gradclip.clip_grad_norm_(ps, c, nonfinite="zero")):
        shard = lying.clone()
        whole.grad = DTensor.from_local(shard, mesh(), [Shard(0)])
        row.grad = DTensor.from_local(shard[2:3], mesh(), [Shard(0)])
        expected = torch.linalg.vector_norm(torch.cat([whole.grad.full_tensor(), row.grad.full_tensor()]))
        norm = call([row, whole, row], 1.0)
        same_everywhere(norm)
        close(norm, expected)
        torch.testing.assert_close(shard, lying / norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(row.grad.to_local(), shard[2:3], rtol=0, atol=0)


def torch_signatures():
    from gradclip.integrations import torch as ours

    full = numbers(8, seed=1)
    p = parameter(full, mesh(), [Shard(0)])
    norm = ours.clip_grad_norm_([p], 1.0)
    assert type(norm) is torch.Tensor
    close(norm, torch.linalg.vector_norm(full))
    total = ours.get_total_norm([distribute_tensor(full, mesh(), [Shard(0)])])
    assert type(total) is torch.Tensor
    close(total, torch.linalg.vector_norm(full))


def other_functions_work_on_each_part():
    from gradclip._src.inplace.norm import clip_grads_with_norm_

    full = numbers(8, seed=1)
    for laid in ([Shard(0)], [Replicate()], [Partial()]):
        p = parameter(full, mesh(), laid, like=[Shard(0)])
        gradclip.clip_grad_value_([p], 1.25)
        assert torch.equal(p.grad.full_tensor(), full.clamp(-1.25, 1.25))
        q = parameter(full, mesh(), laid, like=[Shard(0)])
        clip_grads_with_norm_([q], 1.0, 4.0)
        # A given norm is trusted to float32 precision only, which the coefficient makes up for.
        torch.testing.assert_close(q.grad.full_tensor(), full / 4, rtol=2.0**-21, atol=0)


def units_are_clipped_by_functional_calls():
    full = numbers(8, 4, seed=1)
    for clip in (lambda x: gradclip.clip_by_unit_norm(x, 1.0), lambda x: gradclip.adaptive_grad_clip(x, 5 * x)):
        expected, wanted = clip(full)
        for laid in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
            clipped, norms = clip(laid_out(full, mesh(), laid))
            torch.testing.assert_close(clipped.full_tensor(), expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(norms.full_tensor(), wanted, rtol=1e-6, atol=0)


def norms_and_thresholds_of_torch():
    """PyTorch's norm of distributed tensors is one, too, in which each process has its part of the sum."""
    from gradclip.integrations import torch as ours

    full = numbers(8, seed=1)
    for ord in (2, math.inf):
        p, q = (parameter(full, mesh(), [Shard(0)]) for _ in range(2))
        norm = torch.nn.utils.get_total_norm([p.grad], ord)
        ours.clip_grads_with_norm_([p], 1.0, norm)
        torch.nn.utils.clip_grads_with_norm_([q], 1.0, norm)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor(), rtol=1e-5, atol=0)
    p, q = (parameter(full, mesh(), [Shard(0)]) for _ in range(2))
    gradclip.clip_grad_norm_([p], laid_out(torch.tensor(2.0), mesh(), [Replicate()]))
    gradclip.clip_grad_norm_([q], 2.0)
    assert torch.equal(p.grad.to_local(), q.grad.to_local())
    gradclip.clip_grad_value_([p], laid_out(torch.tensor(0.5), mesh(), [Replicate()]))
    assert p.grad.to_local().abs().max() == 0.5


def functional_calls():
    """These go through PyTorch's own operations on distributed tensors, and return such."""
    full = {"w": numbers(5, 3, seed=1), "b": numbers(4, seed=2), "scale": numbers(3, seed=3)}
    laid = {"w": [Shard(0)], "b": [Replicate()], "scale": [Partial()]}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        alone = {name: x.to(dtype) for name, x in full.items()}
        parts = {name: laid_out(x, mesh(), laid[name]) for name, x in alone.items()}
        for ord in ORDERS:
            clipped, norm = gradclip.clip_by_global_norm(parts, 1.0, ord=ord)
            expected, wanted = gradclip.clip_by_global_norm(alone, 1.0, ord=ord)
            for found in (norm, gradclip.global_norm(parts, ord)):
                same_everywhere(found.to_local())
                close(found.full_tensor(), wanted, ord)
            for name, x in clipped.items():
                close(x.full_tensor(), expected[name], ord)


def layers_of_functional_calls():
    """All norms of a call are reduced together, and leaves keep their layout."""
    full = {"w": numbers(5, 3, seed=1), "b": numbers(4, seed=2), "scale": numbers(3, seed=3)}
    laid = {"w": [Shard(0)], "b": [Replicate()], "scale": [Shard(0)]}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        alone = {name: x.to(dtype) for name, x in full.items()}
        parts = {name: laid_out(x, mesh(), laid[name]) for name, x in alone.items()}
        before = {name: x.to_local().clone() for name, x in parts.items()}
        for ord in ORDERS:
            expected, wanted = gradclip.clip_by_layer_norm(alone, 1.0, ord=ord)
            with CommDebugMode() as counted:
                clipped, norms = gradclip.clip_by_layer_norm(parts, 1.0, ord=ord)
                again = gradclip.layer_norms(parts, ord)
            assert counted.get_total_counts() == 2, counted.get_comm_counts()
            for name, x in clipped.items():
                assert x.placements == tuple(laid[name])
                assert torch.equal(norms[name], again[name])
                same_everywhere(norms[name])
                close(norms[name], wanted[name], ord)
                close(x.full_tensor(), expected[name], ord)
                assert torch.equal(parts[name].to_local(), before[name])
    together = gradclip.layer_norms({"layer": parts}, prefix={"layer": 0})
    close(together["layer"], gradclip.global_norm(alone))


def derivatives_of_functional_calls():
    full = numbers(8, seed=1)
    for laid in (Shard(0), Replicate()):
        for ord in (1, 2, 3, math.inf):
            alone, parts = full.clone().requires_grad_(), laid_out(full, mesh(), [laid]).requires_grad_()
            for x in (alone, parts):
                clipped, norm = gradclip.clip_by_global_norm([x], 1.0, ord=ord)
                (clipped[0].square().sum() + 3 * norm).backward()
            torch.testing.assert_close(parts.grad.full_tensor(), alone.grad, rtol=1e-6, atol=1e-6)


def per_example_calls():
    full = {"w": numbers(6, 3, seed=1), "b": numbers(6, seed=2)}
    summed, info = gradclip.per_example_clip({name: laid_out(x, mesh(), [Shard(0)]) for name, x in full.items()}, 2.0)
    expected, wanted = gradclip.per_example_clip(full, 2.0)
    same_everywhere(info.num_clipped.to_local())
    assert info.num_clipped.item() == wanted.num_clipped.item() > 0
    close(info.norms.full_tensor(), wanted.norms)
    for name, x in summed.items():
        torch.testing.assert_close(x.full_tensor(), expected[name], rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    run_all(globals())
