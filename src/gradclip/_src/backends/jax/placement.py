"""Where arrays are: on which devices, and over which axes of a device mesh they are sharded.

An array may be committed to its devices, or JAX may move it. Its type may be weak. It may be float64 even if 64-bit
mode is off. JAX keeps these properties in its own computations, but they are lost on the way through NumPy. Therefore
results get the device, commitment and type of the leaf they replace.

Sharded arrays are reduced over mesh axes.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gradclip._src.core.arrays import Arrays


def put(data: Sequence[np.ndarray], likes: Sequence[Any]) -> list[jax.Array]:
    """Return the data as JAX arrays, each on the device of its entry in `likes`, and committed if that entry is."""
    groups: dict[Hashable, list[int]] = {}
    for index, like in enumerate(likes):
        groups.setdefault(_place(like), []).append(index)
    if len(groups) == 1:
        return _put(data, likes[0])
    results = list(data)
    for indices in groups.values():
        made = _put([data[index] for index in indices], likes[indices[0]])
        for index, array in zip(indices, made, strict=True):
            results[index] = array
    return results


def like(array: jax.Array, leaf: object) -> Any:
    """Return a result like the untraced leaf it was computed from: a NumPy array, uncommitted, or weakly typed."""
    if of_numpy(leaf):
        # Copy, because a NumPy view of a JAX array is read-only.
        return np.array(array)[()] if isinstance(leaf, np.generic) else np.array(array)
    if isinstance(leaf, jax.Array) and not leaf.committed and _place(array) != _place(leaf):
        # JAX may have moved an uncommitted array to the device of other leaves, or to its default device.
        (array,) = put([np.array(array.addressable_data(0))], [leaf])
    return typed_like(array, leaf)


def of_numpy(leaf: object) -> bool:
    """Say whether a leaf is a NumPy array or scalar."""
    return isinstance(leaf, np.ndarray | np.generic)


def typed_like(array: jax.Array, leaf: object) -> jax.Array:
    """Return the array, weakly typed if the leaf is."""
    weak = type(leaf) in (int, float, complex) or getattr(leaf, "weak_type", False)
    if not weak or array.weak_type:
        return array
    # No public JAX function does this, only the primitive.
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def placed_first(leaves: Sequence[Any]) -> Any:
    """Return the leaf that decides the device of a scalar result: the first committed array, else the first array."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return next((x for x in arrays if x.committed), arrays[0] if arrays else None)


def _place(like: object) -> Hashable:
    return (like.sharding, like.committed) if isinstance(like, jax.Array) else None


def _put(data: Sequence[np.ndarray], like: object) -> list[jax.Array]:
    # One call takes half the time of a call for each array.
    with _mode_for(data):
        if not isinstance(like, jax.Array):
            return jax.device_put(list(data))
        if like.committed:
            return jax.device_put(list(data), like.sharding)
        (device,) = like.devices()
        with jax.default_device(device):
            return jax.device_put(list(data))


def _mode_for(data: Sequence[np.ndarray]) -> AbstractContextManager[Any]:
    """Return a context in which JAX keeps the dtypes of the data."""
    wide = any(x.dtype.char in "dD" for x in data)
    return jax.enable_x64(True) if wide else nullcontext()


@dataclass(frozen=True)
class NamedAxes:
    """Mesh axes over which arrays are sharded, in a function that runs on each device's own shards.

    An array that does not vary over an axis is replicated along it, and counts once. Only `jax.shard_map` with
    `check_vma=True` tracks this. Otherwise every array counts as sharded.
    """

    names: tuple[Hashable, ...]

    @classmethod
    def named(cls, axis_name: Hashable) -> "NamedAxes":
        """Return the axes with this name, or with these names."""
        return cls(_names(axis_name))

    def count(self) -> int:
        """Return the number of devices that hold shards."""
        return math.prod(map(lax.axis_size, self.names))

    def groups(self, arrays: Arrays) -> list[Arrays]:
        """Group the arrays that are sharded over the same axes."""
        found: dict[frozenset[Hashable], list[Any]] = {}
        for x in arrays:
            found.setdefault(_varying(x).intersection(self.names), []).append(x)
        return list(map(Arrays, found.values()))

    def total(self, terms: Sequence[jax.Array]) -> jax.Array:
        """Return the sum of the terms over all devices."""
        if not self._split(terms):
            return sum(terms)
        return lax.psum(sum(_counted_once(term, self.names) for term in terms), self.names)

    def largest(self, terms: Sequence[jax.Array]) -> jax.Array:
        """Return the largest term over all devices."""
        largest = reduce(jnp.maximum, terms)
        # Replicated terms need no special care: the largest of several copies is the same.
        return lax.pmax(largest, self.names) if self._split(terms) else largest

    def _split(self, terms: Sequence[jax.Array]) -> bool:
        """Say whether a term varies over one of the axes, or may vary without JAX tracking it.

        If so, the reduction runs over all axes: XLA combines reductions over the same axes into one message.
        """
        varying = varying_together(terms)
        return any(name in varying or not _tracked(name) for name in self.names)


def _counted_once(term: jax.Array, names: Sequence[Hashable]) -> jax.Array:
    for name in names:
        if _tracked(name) and name not in _varying(term):
            # All devices have the same term. Count it on the first device, and add zero on the others.
            term = jnp.where(lax.axis_index(name) == 0, term, jnp.zeros_like(term))
    return term


def _tracked(name: Hashable) -> bool:
    """Say whether JAX tracks which values vary over an axis."""
    # The index of a device always varies. If JAX does not report even that, it is not tracking.
    return name in _varying(lax.axis_index(name))


def known_layout(arrays: Sequence[jax.Array]) -> tuple[Any, list[Any], NamedAxes] | None:
    """Return the mesh, the partition spec of each array, and the axes in use; None if XLA chooses the layout."""
    shardings = [jax.typeof(x).sharding for x in arrays]
    meshes = {sharding.mesh for sharding in shardings}
    if len(meshes) != 1:
        return None
    (mesh,) = meshes
    # For axes of other types, XLA chooses the layout when it compiles, so it is not known yet.
    if set(mesh.axis_types) != {AxisType.Explicit}:
        return None
    specs = [sharding.spec for sharding in shardings]
    names = dict.fromkeys(name for spec in specs for entry in spec if entry is not None for name in _names(entry))
    return (mesh, specs, NamedAxes(tuple(names))) if names else None


def varying_together(arrays: Sequence[Any]) -> frozenset[Hashable]:
    """Return the axes over which at least one of the arrays varies, as far as JAX tracks that."""
    return frozenset().union(*[_varying(x) for x in arrays if isinstance(x, jax.Array)])


def in_one_piece() -> bool:
    """Say whether the traced code sees each array as being on one device."""
    # Manual axes are those of `shard_map`, inside which a device sees only its own shards.
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    return jax.device_count() == 1 or kinds == {AxisType.Manual}


def varying_alike(*trees: object) -> Any:
    """Mark every array of the trees as varying over all axes that any of the arrays varies over.

    The gradient for an array that does not vary would be summed over all devices, instead of being one example's.
    """
    everywhere = varying_together(jax.tree.leaves(trees))

    def vary(x: object) -> Any:
        missing = tuple(everywhere - _varying(x)) if hasattr(x, "dtype") else ()
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, trees)


def typed_as(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Convert an array to the dtype and sharding of `like`, and mark it as varying over the same axes."""
    x = jnp.asarray(x)
    x = x if x.dtype == like.dtype else x.astype(like.dtype)
    sharding = like.sharding
    explicit = sharding is not None and AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    x = jax.sharding.reshard(x, sharding) if explicit and sharding != jax.typeof(x).sharding else x
    missing = tuple(_axes_of(like) - _varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


@contextmanager
def laid_out_by_xla(tree: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """Let XLA choose all layouts in the block. It gets the arrays for that, which differ on explicit meshes alone.

    After the block, the function gives each device all of a tree of results.
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    kinds = [jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding for x in arrays]
    mesh = next((kind.mesh for kind in kinds if isinstance(kind, NamedSharding) and kind.mesh.explicit_axes), None)
    if mesh is None:
        yield tree, lambda results: results
        return
    automatic, whole = dict.fromkeys(mesh.explicit_axes, AxisType.Auto), NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh).update_axis_types(automatic)):
        yield _resharded(tree, PartitionSpec()), partial(_resharded, sharding=whole)


def _resharded(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding) if isinstance(x, jax.Array) else x, tree)


def _names(entry: Hashable) -> tuple[Hashable, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _varying(x: jax.Array) -> frozenset[Hashable]:
    """Return the axes over which a value differs between devices, as far as JAX tracks that."""
    return _axes_of(jax.typeof(x))


def _axes_of(kind: Any) -> frozenset[Hashable]:
    # The attribute depends on the version of JAX. None means no axes.
    if hasattr(kind, "manual_axis_type"):
        return frozenset() if kind.manual_axis_type is None else kind.manual_axis_type.varying
    return kind.vma or frozenset()
