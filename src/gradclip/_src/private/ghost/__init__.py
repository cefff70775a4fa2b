"""Norms and sums of per-example gradients that are never made: from the inputs and cotangents of matrix products."""
