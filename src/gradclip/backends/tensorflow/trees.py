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

from gradclip.backends.tensorflow.rows import merged, pieces
from gradclip.tree import Sparse, Trees

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

    def keys(self, structure: Any) -> list[tuple[Any, ...]]:
        return [tuple(chain.from_iterable(map(_keys, path))) for path in optree.treespec_paths(structure)]

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
