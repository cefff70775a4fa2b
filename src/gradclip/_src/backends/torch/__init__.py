"""PyTorch's tensors."""
