"""Gradients held in several parts: on the devices of a mesh, by several processes, or in several files."""
