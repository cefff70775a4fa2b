"""The transformer of fsdp2.py on 2 x 2 processes: tensor parallelism within a pair, FSDP2 between the pairs.

Start it with: torchrun --nproc-per-node 4 examples/fsdp_tp.py
"""

import torch
import torch.distributed as dist
from fsdp2 import MAX_NORM, Transformer, loss_of, python_documentation, random_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradclip

STEPS = 30


def parallel(model, mesh):
    """Split the wide layers of each block over "tp", and every parameter over "dp"."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    text, letters = python_documentation()
    torch.manual_seed(0)
    model = parallel(Transformer(letters), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # both ranks of a pair read the same text
    for step in range(1, STEPS + 1):
        pieces, following = random_batch(text, generator)
        loss = loss_of(model(pieces), following)
        optimizer.zero_grad()
        loss.backward()
        # Some gradients are on the 2 x 2 mesh, the others on the "dp" mesh alone. One call clips them all.
        norm = gradclip.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        norms = [None] * dist.get_world_size()
        dist.all_gather_object(norms, norm.item())
        if step in (1, 10, 20, STEPS) and dist.get_rank() == 0:
            equal = "equal" if len(set(norms)) == 1 else "DIFFERENT"
            print(f"step {step:2d}: loss {loss:.3f}, gradient norm {norm:.2f}, {equal} on {len(norms)} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
