"""Calls that clip in place: the gradients of parameters, or trees of NumPy arrays."""
