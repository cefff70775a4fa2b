"""Groups of leaves that share a norm, clipped together."""
