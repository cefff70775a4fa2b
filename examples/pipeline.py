"""Train the transformer of fsdp2.py in two pipeline stages with different layers, clipped by their global norm.

Start it with: torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from fsdp2 import BATCH, LENGTH, MAX_NORM, Transformer, loss_of, python_documentation, random_batch

import gradclip

STEPS = 40
WIDTH = 64
MASK = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


class First(torch.nn.Module):
    """The embeddings and the first block."""

    def __init__(self, model):
        super().__init__()
        self.embed, self.place, self.block = model.embed, model.place, model.blocks[0]

    def train_on(self, pieces, following):
        """Send states to the second stage and wait for their gradient."""
        states = self.block(self.embed(pieces) + self.place.weight, MASK)
        dist.send(states.detach().contiguous(), dst=1)
        gradient = torch.empty_like(states)
        dist.recv(gradient, src=1)
        states.backward(gradient)


class Second(torch.nn.Module):
    """The second block and the head, which computes the loss."""

    def __init__(self, model):
        super().__init__()
        self.block, self.head = model.blocks[1], model.head

    def train_on(self, pieces, following):
        """Return the loss, and send the gradient of the states back."""
        states = torch.empty(BATCH, LENGTH, WIDTH)
        dist.recv(states, src=0)
        loss = loss_of(torch.log_softmax(self.head(self.block(states.requires_grad_(), MASK)), -1), following)
        loss.backward()
        dist.send(states.grad, dst=0)
        return loss


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, letters = python_documentation()
    torch.manual_seed(0)
    stage = (First, Second)[dist.get_rank()](Transformer(letters, WIDTH))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = stage.train_on(*random_batch(text, generator))
        own = gradclip.grad_norm(stage.parameters())
        # The stages hold different layers. The tensors do not show this, so pass the process group.
        norm = gradclip.clip_grad_norm_(stage.parameters(), MAX_NORM, process_group=dist.group.WORLD)
        optimizer.step()
        if step in (1, 20, STEPS) and loss is not None:
            print(f"step {step:2d}: loss {loss:.3f}, gradient norm {norm:.2f}, of the second stage alone {own:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
