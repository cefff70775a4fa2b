"""Gradients in factors for PyTorch."""
