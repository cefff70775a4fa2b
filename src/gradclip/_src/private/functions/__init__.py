"""Functions whose clipped gradients or results are summed over a batch."""
