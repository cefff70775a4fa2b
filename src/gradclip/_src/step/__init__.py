"""Clip at each step of an optimizer or an engine: before it, within it, or in the backward pass."""
