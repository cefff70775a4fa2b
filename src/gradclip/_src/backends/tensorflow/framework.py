"""The TensorFlow entry for the registry."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor

from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.host.backend import dtype_named
from gradclip._src.backends.tensorflow import namespace
from gradclip._src.backends.tensorflow.host import (
    HOST,
    TensorFlowHost,
    in_host_memory,
    placed,
    taken_over,
    tensor_of,
    viewed,
)
from gradclip._src.backends.tensorflow.trees import TENSORFLOW_TREES, TensorFlowTrees, described
from gradclip._src.core.formats import BFLOAT16, bare_name
from gradclip._src.core.protocols import Backend
from gradclip._src.tree import Sparse


class TensorFlow(Framework):
    """TensorFlow tensors and variables on any device, and symbolic tensors in graphs."""

    namespace = namespace

    @property
    def trees(self) -> TensorFlowTrees:
        return TENSORFLOW_TREES

    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> Backend:
        arrays = [x for x in (*leaves, *scalars) if isinstance(x, tf.Tensor | tf.Variable)]
        eager = tf.executing_eagerly() and not any(map(tf.is_symbolic_tensor, arrays))
        if eager and all(map(in_host_memory, arrays)):
            return HOST
        if not eager and not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 1 graphs are not supported: they compare tensors by identity. Clip eagerly, or "
                "in tf.function."
            )
        from gradclip._src.backends.tensorflow.graph import Graph  # not needed for trees in host memory

        return Graph(visible=eager)

    def on_fast_path(self, leaves: Sequence[Any]) -> TensorFlowHost | None:
        # `known` checks the other leaves.
        return HOST if type(leaves[0]) is EagerTensor and tf.executing_eagerly() else None

    def on_host(self, leaf: Any) -> HostArray:
        return viewed(tensor_of(leaf))

    def number(self, scalar: Any) -> Any:
        return scalar.numpy().item()

    def kept(self, array: Any) -> tf.Tensor:
        return tf.convert_to_tensor(array)  # a variable becomes its value

    def beside(self, array: Any, like: Any) -> tf.Tensor:
        return placed(tf.stop_gradient(array), like)

    def is_traced(self, array: object) -> bool:
        # In a graph, the value of a variable is symbolic too.
        return tf.is_symbolic_tensor(array) or (isinstance(array, tf.Variable) and not tf.executing_eagerly())

    generator = "a tf.random.Generator"

    def noised(self, leaves: Sequence[Any], std: float, rng: Any) -> list[tf.Tensor] | None:
        if not isinstance(rng, tf.random.Generator):
            return None

        def noised(x: Any) -> tf.Tensor:
            wide = tf.float64 if x.dtype == tf.float64 else tf.float32
            return tf.cast(tf.cast(x, wide) + rng.normal(tf.shape(x), stddev=std, dtype=wide), x.dtype)

        return [noised(x) for x in leaves]

    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> tf.Tensor:
        made = np.asarray(values.astype(dtype_named(dtype)))
        bits = made.view(np.uint16) if dtype == BFLOAT16.name else made
        return placed(taken_over(bits, dtype), leaf)

    def zeros(self, shape: tuple[int, ...], leaf: Any) -> tf.Tensor:
        return self.like(leaf, bare_name(leaf.dtype), np.zeros(shape))

    def as_float(self, array: object) -> tf.Tensor:
        return tf.cast(array, tf.float32)

    def first_sparse(self, leaves: Sequence[Any]) -> Sparse | None:
        return next((described(i, leaf) for i, leaf in TENSORFLOW_TREES.sparse(leaves).items()), None)

    def lies_itself(self, array: object) -> bool:
        return isinstance(array, tf.Variable)

    def may_be_weights(self, array: object) -> bool:
        return isinstance(array, tf.Variable) and array.trainable


TENSORFLOW = TensorFlow()
