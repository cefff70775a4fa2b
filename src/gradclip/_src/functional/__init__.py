"""Calls that return new trees, and exact answers about norms."""
