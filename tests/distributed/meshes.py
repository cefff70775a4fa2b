"""Meshes of four processes, made once."""

from torch.distributed.device_mesh import init_device_mesh

MESHES = {}


def mesh():
    """Return a mesh of 2 x 2 processes."""
    if "2x2" not in MESHES:
        MESHES["2x2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        MESHES["4"] = init_device_mesh("cpu", (4,))
    return MESHES["2x2"]


def line():
    """Return a mesh of the same processes in one row."""
    mesh()
    return MESHES["4"]
