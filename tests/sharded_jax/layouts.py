"""Trees on meshes of devices, drawn at random, and what their compiled programs send."""

import math
import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rational import at_most

MESHES = [(8,), (4,), (4, 2), (2, 4), (2, 2), (2, 2, 2)]
DTYPES = ["float32", "bfloat16", "float16", "float64", "complex64"]
AXES = "xyz"


class Layout(NamedTuple):
    mesh: jax.sharding.Mesh
    specs: list
    tree: list
    whole: list

    @property
    def names(self):
        return self.mesh.axis_names


def mesh_of(shape, axis_type):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, tuple(AXES[: len(shape)]), axis_types=(axis_type,) * len(shape), devices=devices)


def spec_of(rng, names, *, all_axes):
    """Return how an array of three axes is split: each mesh axis to one of them, or if not `all_axes` to none."""
    entries = [[], [], []]
    for name in names:
        position = rng.integers(0 if all_axes else -1, 3)
        if position >= 0:
            entries[position].append(name)
    return P(*(tuple(entry) or None for entry in entries))


def draw(seed, axis_type, *, all_axes=False):
    rng = np.random.default_rng(seed)
    mesh = mesh_of(MESHES[rng.integers(len(MESHES))], axis_type)
    count = rng.integers(1, 5)
    specs = [spec_of(rng, mesh.axis_names, all_axes=all_axes) for _ in range(count)]
    dtypes = [DTYPES[rng.integers(len(DTYPES))] for _ in range(count)]
    scales = 10.0 ** rng.uniform(-3, 3, count)
    whole = [array_of(rng, dtype, scale) for dtype, scale in zip(dtypes, scales, strict=True)]
    return Layout(mesh, specs, placed(mesh, specs, whole), whole)


def array_of(rng, dtype, scale):
    shape = (8, 8 * rng.integers(1, 3), 8)
    values = rng.standard_normal(shape) * scale
    if dtype == "complex64":
        values = values + 1j * rng.standard_normal(shape) * scale
    return np.asarray(values).astype(jnp.dtype(dtype))


def placed(mesh, specs, whole):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(whole, specs, strict=True)]


def run(function, *args):
    """Return what a compiled function returns, and how often each collective operation occurs in its text."""
    compiled = jax.jit(function).lower(*args).compile()
    pattern = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
    return compiled(*args), Counter(re.findall(pattern, compiled.as_text()))


def assert_same(results, norm, expected, expected_norm):
    """Compare clipped leaves and their norm with those of one device.

    Clipped float64 leaves may lie apart by the proven error of their norm, by which the coefficient is lowered; it
    depends on how many additions are made one after the other.
    """
    doubles = any(x.dtype == np.float64 for x in expected)
    np.testing.assert_allclose(np.float64(norm), np.float64(expected_norm), rtol=2e-14 if doubles else 2e-6)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        step = float(jnp.finfo(wanted.dtype).eps)
        wide = np.complex128 if result.dtype == np.complex64 else np.float64
        np.testing.assert_allclose(
            np.asarray(result).astype(wide),
            np.asarray(wanted).astype(wide),
            rtol=1e-11 if result.dtype == np.float64 else max(2 * step, 2e-6),
            atol=float(jnp.finfo(wanted.dtype).tiny),
        )


def assert_bound(results, ord, max_norm):
    """Check the bound in exact arithmetic, where magnitudes of complex numbers need no root."""
    arrays = [np.asarray(x) for x in results]
    if ord != -math.inf and not (ord == 1 and any(map(np.iscomplexobj, arrays))):
        assert at_most(arrays, ord, max_norm)


__all__ = ["AxisType", "Layout", "P", "assert_bound", "assert_same", "draw", "mesh_of", "placed", "run"]
