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

from gradclip.backends.framework import Sparse
from gradclip.backends.registry import known

_NAMESPACE = "gradclip.tensorflow"
_HALVES = {tf.float16, tf.bfloat16}
_registered: set[type] = set()
_registering = Lock()


class TensorFlowTrees:
    """`Trees` for TensorFlow, with optree's functions and the containers of `tf.nest` as nodes."""

    def knows(self, leaf: object) -> bool:
        if isinstance(leaf, _COMPOSITE):
            return True
        return _is_node(leaf) and any(isinstance(held, _LEAVES) for held in tf.nest.flatten(leaf))

    def flatten(self, tree: object) -> tuple[list[Any], Any]:
        while True:
            leaves, structure = optree.tree_flatten(tree, namespace=_NAMESPACE)
            kinds = {type(leaf) for leaf in leaves if not known(leaf) and _is_node(leaf)}
            if not kinds:
                return leaves, structure
            _register(kinds)

    def unflatten(self, structure: Any, leaves: Iterable[Any]) -> Any:
        return optree.tree_unflatten(structure, leaves)

    def paths(self, structure: Any) -> list[str]:
        return [accessor.codify("") for accessor in optree.treespec_accessors(structure)]

    def keys(self, structure: Any) -> list[tuple[Any, ...]]:
        return [tuple(chain.from_iterable(map(_keys, path))) for path in optree.treespec_paths(structure)]

    def subtrees(self, structure: Any, tree: object) -> list[Any]:
        return structure.flatten_up_to(tree)

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

    def with_elements(self, array: Any, elements: Any) -> tf.IndexedSlices:
        return tf.IndexedSlices(elements, array.indices, array.dense_shape)


def described(place: int, array: Any) -> Sparse:
    """Describe a sparse array for error messages."""
    return Sparse(place, type(array).__name__, _DENSE[type(array)])


def merged(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Merge the pieces of each row: put their sum at the row's first piece, and zeros at its other pieces."""
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
    # Half precision cannot add thousands of pieces: its sum of ones stops growing at 256 (bfloat16) or 2,048 (float16).
    wide = tf.cast(values, tf.float32) if values.dtype in _HALVES else values
    sums = tf.cast(tf.math.unsorted_segment_sum(wide, first, count), values.dtype)
    # Do not add zero to a row with one piece: that would turn -0.0 into 0.0 and flush subnormals.
    shape = tf.concat([[count], tf.ones([tf.rank(values) - 1], tf.int32)], 0)
    return tf.where(tf.reshape(alone, shape), values, sums)


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
