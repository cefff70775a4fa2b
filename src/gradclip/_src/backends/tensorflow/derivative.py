"""The derivative of clipping for TensorFlow. Tapes use one rule for it, not the derivative of each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# TensorFlow has no public way to ask whether a tape records, or whether it watches a tensor.
from tensorflow.python.eager.record import could_possibly_record
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes

from gradclip._src.backends.tensorflow import namespace


def call_differentiably(
    function: Callable[..., Any],
    rule: Any,
    leaves: Sequence[tf.Tensor],
    max_norm: tf.Tensor | None,
    mask: Any = None,
) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
    """Call `function`, which returns results, a norm and counts. Its derivative is that of `rule`."""
    if not leaves:
        return function(leaves, max_norm, mask)
    given = list(map(tf.convert_to_tensor, leaves if max_norm is None else [*leaves, max_norm]))
    given, mask = list(map(_local, given)), _local(mask)
    sizes: list[int] = []

    def call(*given: tf.Tensor) -> Any:
        xs, threshold = list(given[: len(leaves)]), None if max_norm is None else given[-1]
        results, norm, counts = function(xs, threshold, mask)
        sizes[:] = [len(results), len(counts)]

        def gradient(*changes: tf.Tensor) -> list[tf.Tensor]:
            gnorm = changes[len(results)] if rule.measures else None
            known = _norm(rule, norm, xs, threshold, mask) if rule.measures else None
            place = rule.at(xs, known, threshold, mask)
            # A leaf of unknown rank was flattened, but its result was reshaped back. So flatten its gradient as well.
            given = zip(changes, results, strict=False)
            flat = [tf.reshape(change, [-1]) if y.shape.rank is None else change for change, y in given]
            gxs, gmax = rule.vjp(namespace, place, flat, gnorm)
            return gxs if threshold is None else [*gxs, tf.cast(gmax, threshold.dtype)]

        return [*results, *([norm] if rule.measures else []), *counts], gradient

    made = tf.custom_gradient(call)(*given)
    results, rest = list(made[: sizes[0]]), list(made[sizes[0] :])
    return results, rest.pop(0) if rule.measures else None, rest


def _norm(rule: Any, norm: tf.Tensor, leaves: Sequence[tf.Tensor], max_norm: tf.Tensor | None, mask: Any) -> tf.Tensor:
    """Attach a derivative to the norm, which is already computed. Second derivatives of clipping need it."""
    leaves, norm, max_norm, mask = list(map(_local, leaves)), _local(norm), _local(max_norm), _local(mask)

    @tf.custom_gradient
    def call(*xs: tf.Tensor) -> Any:
        def gradient(change: tf.Tensor) -> list[tf.Tensor]:
            place = rule.at(xs, _norm(rule, norm, xs, max_norm, mask), max_norm, mask)
            return rule.vjp(namespace, place, [], change)[0]

        return tf.identity(norm), gradient

    return call(*leaves)


def _local(x: Any) -> Any:
    """Return a tensor as one of the graph that is being recorded, anything else unchanged.

    The gradient of a graph is recorded in another graph, which can read the tensors of that graph only.
    """
    return tf.identity(x) if isinstance(x, tf.Tensor) and not tf.executing_eagerly() else x


def asked(leaves: Sequence[Any]) -> bool:
    """Say whether a tape or a forward accumulator may ask for a derivative with respect to the leaves."""
    if not could_possibly_record():
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    # A tape watches a variable as soon as it is read.
    return len(tensors) < len(leaves) or PossibleTapeGradientTypes(tensors) > 0


def call_as_asked(
    function: Callable[..., Any], rule: Any, leaves: Sequence[tf.Tensor], max_norm: Any, mask: Any = None
) -> tuple[list[tf.Tensor], Any, list[tf.Tensor]]:
    """Call `function` on eager tensors. Attach the derivative of `rule` only if a tape may ask for it."""
    given = leaves if max_norm is None else [*leaves, max_norm]
    if asked(given):
        return call_differentiably(function, rule, leaves, max_norm, mask)
    return function(leaves, max_norm, mask)
