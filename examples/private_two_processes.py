"""Train privately on several processes: batches and noise are drawn once, on one of them.

Start it with: torchrun --nproc-per-node 2 examples/private_two_processes.py
"""

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn.functional import mse_loss

import gradclip

EXAMPLES, FEATURES = 2000, 16
STEPS = 20


def private_gradient(summed, run):
    """Return the sum over all processes with noise that the first one draws, the same on each."""
    for part in summed.values():
        dist.all_reduce(part)
    # Exact noise is for the whole sum. Smaller noise of each process would add up to another distribution.
    released = summed if run is None else run.add_noise(summed)
    for part in released.values():
        dist.broadcast(part, src=0)
    return released


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same data and model on each process
    inputs = torch.randn(EXAMPLES, FEATURES)
    targets = inputs.sum(dim=1, keepdim=True) / 4
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(parameters, x, y):
        return mse_loss(functional_call(model, parameters, (x,)), y)

    # The settings are the same on each process, and only the first draws.
    batches = gradclip.PoissonBatches(EXAMPLES, 0.2, steps=STEPS)
    own = -(-batches.pad_to // world)  # the places of a process
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), pad_to=own)
    # One example is in one place of one process, so the sums together move by no more than one of them.
    sensitivity = clipped.sensitivity(layout=gradclip.SumLayout(partial_sums=world))
    run = gradclip.PrivateRun(batches, sensitivity, delta=1e-5, epsilon=3.0) if rank == 0 else None
    drawn = iter(batches) if rank == 0 else None

    for _ in range(STEPS):
        places = torch.zeros(2, own * world, dtype=torch.int64)
        if drawn is not None:
            indices, mask = next(drawn)
            places[0, : len(indices)], places[1, : len(mask)] = torch.as_tensor(indices), torch.as_tensor(mask)
        dist.broadcast(places, src=0)
        # Always the same places, so that no example moves where another is left out.
        indices, mask = places[:, rank::world]
        summed = clipped(dict(model.named_parameters()), inputs[indices], targets[indices], mask=mask.bool())
        released = private_gradient(summed, run)
        for name, parameter in model.named_parameters():
            parameter.grad = released[name].to(parameter.dtype) / (EXAMPLES * batches.rate)
        optimizer.step()

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    found = [torch.zeros_like(weights) for _ in range(world)]
    dist.all_gather(found, weights)
    if run is not None:
        print(run)
        print(f"loss {mse_loss(model(inputs), targets):.4f}; equal on {world} processes: {found[0].equal(found[-1])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
