"""Look at the steps of an optimizer, and tell of mistakes in how gradients are clipped."""
