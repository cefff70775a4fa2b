"""Gradients in factors for JAX."""
