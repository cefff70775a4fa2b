"""TensorFlow's clipping functions: eager, compiled by XLA, and on slices with rows listed twice."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gradclip.integrations import tensorflow as ours
from side_by_side.cases import CASES, FEW, NORMS
from side_by_side.exact import Clamp, Norm, Rule, each_leaf, mean_norm, rows, together
from side_by_side.functions import Call, Function, Library, function
from side_by_side.libraries.tensorflow_arrays import tf
from side_by_side.verdict import Answer

peer = SimpleNamespace(
    clip_by_global_norm=tf.clip_by_global_norm,
    clip_by_norm=tf.clip_by_norm,
    clip_by_value=tf.clip_by_value,
    clip_by_average_norm=tf.compat.v1.clip_by_average_norm,
    global_norm=tf.linalg.global_norm,
)
WITH_ROWS = tuple(name for name in FEW if not name.startswith("scalars"))


def tensors(leaves: Sequence[np.ndarray]) -> list[tf.Tensor]:
    return [tf.constant(x) for x in leaves]


def clip_by_global_norm(compiled: bool = False) -> Callable[[Any], Call]:
    def of(module: Any) -> Call:
        def call(leaves: list[np.ndarray], threshold: float) -> Answer:
            clip = lambda given: module.clip_by_global_norm(given, threshold)
            clipped, norm = (tf.function(clip, jit_compile=True) if compiled else clip)(tensors(leaves))
            return Answer([x.numpy() for x in clipped], [_array(norm)])

        return call

    return of


def _array(norm: Any) -> np.ndarray:
    """Return a norm as an array. A Python number, the norm of no tensors, becomes float32."""
    return tf.convert_to_tensor(norm).numpy()


def with_norm(module: Any) -> Call:
    """Return a call with the norm that the module itself computes."""

    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        given = tensors(leaves)
        clipped, _ = module.clip_by_global_norm(given, threshold, module.global_norm(given))
        return Answer([x.numpy() for x in clipped])

    return call


def of_slices(module: Any) -> Call:
    """List each row twice, with half of its values each time."""

    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        clipped, norm = module.clip_by_global_norm(list(map(_halves, leaves)), threshold)
        return Answer([tf.convert_to_tensor(x).numpy() for x in clipped], [_array(norm)])

    return call


def _halves(leaf: np.ndarray) -> tf.IndexedSlices:
    half = tf.constant(leaf / leaf.dtype.type(2))
    return tf.IndexedSlices(tf.concat([half, half], 0), tf.constant([*range(len(leaf))] * 2, tf.int32), leaf.shape)


def each(name: str, **options: Any) -> Callable[[Any], Call]:
    """Return a call of a function that takes one tensor and a threshold."""

    def of(module: Any) -> Call:
        clip = getattr(module, name)
        return lambda leaves, c: Answer([clip(x, c, **options).numpy() for x in tensors(leaves)])

    return of


def clip_by_value(module: Any) -> Call:
    return lambda leaves, c: Answer([module.clip_by_value(x, -c, c).numpy() for x in tensors(leaves)])


def global_norm(module: Any) -> Call:
    return lambda leaves, _: Answer([], [_array(module.global_norm(tensors(leaves)))])


def _few(name: str, call: Callable[[Any], Call], rule: Rule, cases: Sequence[str] = FEW, **more: Any) -> Function:
    return function(name, call, peer, ours, rule, cases=cases, **more)


LIBRARY = Library(
    "TensorFlow",
    tf.__version__,
    [
        function("clip_by_global_norm", clip_by_global_norm(), peer, ours, Rule(together)),
        _few("clip_by_global_norm (XLA)", clip_by_global_norm(compiled=True), Rule(together), formats=()),
        _few("clip_by_global_norm (use_norm)", with_norm, Rule(together), formats=("float32", "float64")),
        _few(
            "clip_by_global_norm (IndexedSlices)", of_slices, Rule(together), WITH_ROWS, formats=("float32", "float64")
        ),
        function("clip_by_norm", each("clip_by_norm"), peer, ours, Rule(each_leaf)),
        _few("clip_by_norm (axes=-1)", each("clip_by_norm", axes=[-1]), Rule(rows), WITH_ROWS),
        function(
            "clip_by_average_norm", each("clip_by_average_norm"), peer, ours, Rule(mean_norm), formats=("float32",)
        ),
        function("clip_by_value", clip_by_value, peer, ours, Clamp(), cases=tuple(CASES)),
        function("global_norm", global_norm, peer, ours, Norm(), cases=NORMS, formats=()),
    ],
)
