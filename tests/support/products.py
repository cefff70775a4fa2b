"""What this machine's matrix products do, on which some promises depend."""

import torch


def computes_all_places_alike():
    """Say whether equal rows of a matrix have equal products to the last bit: on some processors they have not."""
    torch.manual_seed(0)
    for width in (3, 10, 16, 64):
        products = torch.randn(1, width).expand(16, width).contiguous() @ torch.randn(width, 10)
        if not (products == products[0]).all():
            return False
    return True
