"""Clip where PyTorch already reads the gradients: within the step of a fused optimizer, or in the backward pass."""
