"""The backends for MLX."""
