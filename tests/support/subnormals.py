"""Threads that read subnormal numbers as zeros."""

from contextlib import contextmanager

import torch

from gradclip._src.flush_mode import flushes


@contextmanager
def flushing():
    """Make this thread such a one, as users of PyTorch can, and an ordinary one again at the end."""
    assert torch.set_flush_denormal(True)
    try:
        assert flushes()
        yield
        assert flushes()
    finally:
        torch.set_flush_denormal(False)
    assert not flushes()
