"""JAX's arrays."""
