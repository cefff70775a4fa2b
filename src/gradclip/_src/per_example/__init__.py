"""Sums of clipped examples, from arrays, functions or losses, and their sensitivity to one example."""
