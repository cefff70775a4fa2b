"""Parameters that an optimizer steps, and what the steps change."""

import torch


def parameters(count=4, rows=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(rows, 2, generator=generator)) for _ in range(count)]


def steps(optimizer, *scales, sparse=False):
    generator = torch.Generator().manual_seed(1)
    for scale in scales or (1.0, 1.0, 30.0):
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.randn(one.shape, generator=generator) * scale
                one.grad = one.grad.to_sparse() if sparse else one.grad
        optimizer.step()


def values(optimizer):
    return [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]


def moved(optimizer, before):
    """Return the RMS of each update, in units of the learning rate."""
    each = zip(values(optimizer), before, strict=True)
    return [(one - other).pow(2).mean().sqrt().item() / optimizer.param_groups[0]["lr"] for one, other in each]
