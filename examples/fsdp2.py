"""Train a small transformer with FSDP2, which shards its parameters over processes, and clip by the global norm.

Start it with: torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import math
from pydoc_data import topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradclip

STEPS = 60
LENGTH = 48
BATCH = 8
MAX_NORM = 1.0


class Block(torch.nn.Module):
    """Attention to the previous letters, and two wide layers."""

    def __init__(self, width):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.widen = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])

    def forward(self, x, mask):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.narrow(torch.nn.functional.gelu(self.widen(self.norms[1](x))))


class Transformer(torch.nn.Module):
    """A stack of blocks that maps letters to log probabilities of the next letter."""

    def __init__(self, letters, width=64, depth=2):
        super().__init__()
        self.embed = torch.nn.Embedding(letters, width)
        self.place = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = torch.nn.Linear(width, letters)

    def forward(self, text):
        x = self.embed(text) + self.place.weight
        mask = torch.full((LENGTH, LENGTH), -math.inf, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return torch.log_softmax(self.head(x), -1)


def python_documentation():
    """Return the text of Python's built-in help topics as numbers, and the number of different letters."""
    text = "".join(topics.topics.values())
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text]), len(letters)


def random_batch(text, generator):
    """Return pieces of the text, and the letter that follows each of their letters."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return batch[:, :-1], batch[:, 1:]


def loss_of(log_probabilities, following):
    return torch.nn.functional.nll_loss(log_probabilities.flatten(0, 1), following.flatten())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text, letters = python_documentation()
    torch.manual_seed(0)
    model = Transformer(letters)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)  # each process reads different parts of the text
    clipped = 0
    for step in range(1, STEPS + 1):
        pieces, following = random_batch(text, generator)
        loss = loss_of(model(pieces), following)
        optimizer.zero_grad()
        loss.backward()
        # Each process holds a shard of every gradient. All get the same global norm.
        norm = gradclip.clip_grad_norm_(model.parameters(), MAX_NORM)
        clipped += int(norm > MAX_NORM)
        optimizer.step()
        if step in (1, 20, 40, STEPS):
            mean = loss.detach() / world
            dist.all_reduce(mean)
            after = gradclip.grad_norm(model.parameters())
            if rank == 0:
                print(f"step {step:2d}: loss {mean:.3f}, gradient norm {norm:.2f} before clipping, {after:.2f} after")
    if rank == 0:
        print(f"clipped in {clipped} of {STEPS} steps on {world} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
