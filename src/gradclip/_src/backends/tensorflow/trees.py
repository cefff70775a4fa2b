"""TensorFlow trees: containers that only `tf.nest` can flatten, and `tf.IndexedSlices` as sparse leaves.

A `tf.IndexedSlices` is clipped as one tensor of its rows. Several pieces of one row count as their sum, as they do when
an optimizer applies them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any

import optree
import tensorflow as tf
from tensorflow.python.util import nest  # the public `tf.nest` does not list paths

from gradclip._src.tree import FlatTree, Sparse, Trees

_NAMESPACE = "gradclip.tensorflow"
_registered: set[type] = set()
_registering = Lock()


class TensorFlowTrees(Trees):
    """`Trees` for TensorFlow, with optree's functions and the containers of `tf.nest` as nodes."""

    def knows(self, leaf: object) -> bool:
        if isinstance(leaf, _COMPOSITE):
            return True
        return _is_node(leaf) and any(isinstance(held, _LEAVES) for held in tf.nest.flatten(leaf))

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        while True:
            leaves, structure = optree.tree_flatten(tree, namespace=_NAMESPACE)
            # There are few types, and asking TensorFlow about each leaf would take longer than clipping it.
            kinds = {kind for kind, leaf in dict(zip(map(type, leaves), leaves, strict=True)).items() if _is_node(leaf)}
            if not kinds:
                return leaves, structure
            _register(kinds)

    def keys(self, flat: FlatTree) -> list[tuple[Any, ...]]:
        return [tuple(chain.from_iterable(map(_keys, path))) for path in optree.treespec_paths(flat.structure)]

    def sparse(self, leaves: Sequence[Any]) -> Mapping[int, Any]:
        return {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, _COMPOSITE)}

    def described(self, place: int, array: Any) -> Sparse:
        return described(place, array)

    def elements(self, array: Any) -> tf.Tensor:
        if not isinstance(array, tf.IndexedSlices):
            raise TypeError(
                f"sparse gradients must be tf.IndexedSlices, got {type(array).__name__}. Pass {_INSTEAD[type(array)]}."
            )
        return merged(tf.convert_to_tensor(array.values), tf.convert_to_tensor(array.indices))

    def with_elements(self, array: Any, before: tf.Tensor, elements: tf.Tensor) -> tf.IndexedSlices:
        return tf.IndexedSlices(pieces(array, before, elements), array.indices, array.dense_shape)


def described(place: int, array: Any) -> Sparse:
    """Describe a sparse array for error messages."""
    return Sparse(place, type(array).__name__, _DENSE[type(array)])


@dataclass(frozen=True)
class _Steps:
    """The path through a node of `tf.nest` to one of its leaves, as keys and as Python code."""

    keys: tuple[Any, ...]
    written: str


class _Entry(optree.PyTreeEntry):
    """A `_Steps` path in the form that optree stores."""

    def codify(self, node: str = "") -> str:
        return node + self.entry.written


@dataclass(frozen=True)
class _Outline:
    """A container with None in place of its leaves, and flags for leaves that were None before."""

    container: Any
    empty: tuple[bool, ...]


def _is_node(leaf: object) -> bool:
    return tf.nest.is_nested(leaf) and not isinstance(leaf, range)


def _register(kinds: Iterable[type]) -> None:
    with _registering:
        for kind in kinds:
            if kind not in _registered:
                optree.register_pytree_node(kind, _apart, _together, path_entry_type=_Entry, namespace=_NAMESPACE)
                _registered.add(kind)


def _apart(node: Any) -> tuple[list[Any], _Outline, list[_Steps]]:
    found = nest.flatten_with_tuple_paths(node)
    empty = tuple(leaf is None for _, leaf in found)
    outline = _Outline(tf.nest.pack_sequence_as(node, [None] * len(found)), empty)
    held = [(path, leaf) for path, leaf in found if leaf is not None]
    return [leaf for _, leaf in held], outline, [_Steps(path, _written(node, path)) for path, _ in held]


def _together(outline: _Outline, leaves: Iterable[Any]) -> Any:
    given = iter(leaves)
    return tf.nest.pack_sequence_as(outline.container, [None if empty else next(given) for empty in outline.empty])


def _written(node: Any, path: Sequence[Any]) -> str:
    written = ""
    for key in path:
        by_name = isinstance(key, str) and not isinstance(node, Mapping)
        written += f".{key}" if by_name else f"[{key!r}]"
        node = getattr(node, key) if by_name else _held(node)[key]
    return written


def _held(node: Any) -> Any:
    """Return the contents of a node, accessible by index or key. Custom classes and dict views become sequences."""
    if hasattr(node, "__tf_flatten__"):
        return node.__tf_flatten__()[1]
    return node if hasattr(node, "__getitem__") else list(node)


def _keys(entry: Any) -> tuple[Any, ...]:
    return entry.keys if isinstance(entry, _Steps) else (entry,)


# The rows of a `tf.IndexedSlices`: pieces of one row are merged to clip them, and kept if nothing changes


def merged(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Merge the pieces of each row: put their sum at the row's first piece, and zeros at its other pieces.

    Sums are rounded once, from float64. Half types become float32, where the sum of their pieces fits.
    """
    count = tf.shape(indices)[0]
    # Sort, because the number of distinct rows is unknown, and a compiler needs static shapes.
    order = tf.argsort(indices, stable=True)
    ordered = tf.gather(indices, order)
    begins = tf.concat([tf.equal(ordered[:1], ordered[:1]), tf.not_equal(ordered[1:], ordered[:-1])], 0)
    row = tf.scatter_nd(order[:, None], tf.cumsum(tf.cast(begins, tf.int32)) - 1, [count])
    first = tf.gather(tf.math.unsorted_segment_min(tf.range(count), row, count), row)
    alone = tf.gather(tf.math.unsorted_segment_sum(tf.ones_like(row), row, count), row) == 1
    if tf.executing_eagerly() and bool(tf.reduce_all(alone)):
        return values
    given = tf.cast(values, tf.float32) if values.dtype in _HALVES else values
    wide = tf.cast(values, _WIDE.get(values.dtype, tf.float64))
    sums = tf.cast(tf.math.unsorted_segment_sum(wide, first, count), given.dtype)
    # Do not add zero to a row with one piece: that would turn -0.0 into 0.0 and flush subnormals.
    shape = tf.concat([[count], tf.ones([tf.rank(values) - 1], tf.int32)], 0)
    return tf.where(tf.reshape(alone, shape), given, sums)


def pieces(array: tf.IndexedSlices, before: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return the pieces of other rows: those of the array if the rows are those `before`, else the rows themselves."""
    values = tf.convert_to_tensor(array.values)
    if before is values:  # no row has several pieces
        return rows
    return tf.where(_same(before, rows), values, _toward_zero(rows, values))


def _same(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Say whether all elements are finite and have the same bits. A comparison of numbers may flush some to zero."""
    if x.dtype.is_complex:
        return _same(tf.math.real(x), tf.math.real(y)) & _same(tf.math.imag(x), tf.math.imag(y))
    bits = tf.int64 if x.dtype == tf.float64 else tf.int32 if x.dtype == tf.float32 else tf.int16
    return tf.reduce_all(tf.math.is_finite(x) & (tf.bitcast(x, bits) == tf.bitcast(y, bits)))


def _toward_zero(x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Convert float32 numbers to the half type of `like`. The largest number takes the place of larger ones."""
    if x.dtype == like.dtype:
        return x

    @tf.custom_gradient
    def converted(x: tf.Tensor) -> Any:
        if like.dtype == tf.bfloat16:  # the first half of the bits of float32
            found = tf.cast(tf.bitcast(tf.bitcast(x, tf.int32) & -(1 << 16), tf.float32), tf.bfloat16)
        else:
            nearest = tf.cast(x, like.dtype)
            bits = tf.bitcast(nearest, tf.int16)
            larger = tf.abs(tf.cast(nearest, x.dtype)) > tf.abs(x)
            found = tf.bitcast(tf.where(larger, bits - 1, bits), like.dtype)
        return found, lambda slope: tf.cast(slope, x.dtype)

    return converted(x)


_HALVES = {tf.float16, tf.bfloat16}
_WIDE = {tf.complex64: tf.complex128, tf.complex128: tf.complex128}
_COMPOSITE = (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)
_LEAVES = (tf.Tensor, tf.Variable, *_COMPOSITE)
_DENSE = {
    tf.IndexedSlices: "tf.convert_to_tensor",
    tf.SparseTensor: "tf.sparse.to_dense",
    tf.RaggedTensor: ".to_tensor()",
}
_INSTEAD: dict[type, str] = {
    tf.SparseTensor: "tf.sparse.to_dense(x), or x.values if no index occurs twice",
    tf.RaggedTensor: "x.flat_values, and make the result ragged again with x.with_flat_values",
}

TENSORFLOW_TREES = TensorFlowTrees()
