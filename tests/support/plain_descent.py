"""A parameter with a gradient, and descent on it."""

import torch


def plain(grad=(3.0, 4.0), **settings):
    """Return a parameter of two zeros with a gradient, and descent on it that takes the gradient as it is."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor(grad)
    return weight, torch.optim.SGD([weight], lr=1.0, **settings)
