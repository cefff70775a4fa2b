"""A step of training under a GradScaler."""

import torch


def stepped(scaler, weight, optimizer, values=(3.0, 4.0), *, unscale=False):
    """Take one step as PyTorch describes it, whose gradient is `values`."""
    optimizer.zero_grad()
    scaler.scale(weight @ torch.as_tensor(values)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
