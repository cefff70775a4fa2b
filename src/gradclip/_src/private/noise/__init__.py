"""Noise whose distribution is exact."""
