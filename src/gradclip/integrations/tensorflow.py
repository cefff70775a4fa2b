"""Drop-in replacements for TensorFlow's clipping functions.

To switch, write `from gradclip.integrations.tensorflow import clip_by_global_norm`. What differs from TensorFlow:

- The result's norm never exceeds the threshold, even by rounding.
- Norms do not overflow, and are returned in float32 or wider.
- Rows of `tf.IndexedSlices` with the same index count as their sum.
- Tensors that need no clipping are returned bit-identical.
- A negative or NaN threshold is an error, if its value is known.
- `name` is accepted and ignored.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradclip._src.backends.imported import needed_for
from gradclip._src.core.decision import Clipping, from_norm
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.norms import EUCLIDEAN
from gradclip._src.core.rules import CLIP
from gradclip._src.core.values import elements_of
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional import clip
from gradclip._src.functional.driver import clip_by_scopes
from gradclip._src.passed.arguments import check_norm, check_threshold
from gradclip._src.passed.leaves import prepared, without_integers
from gradclip._src.passed.unit_axes import scopes_beside
from gradclip._src.tree import flatten
from gradclip._src.words import typed, with_advice

with needed_for("tensorflow", "tensorflow"):
    import tensorflow as tf

    from gradclip._src.backends.tensorflow.graph import Graph

__all__ = ["clip_by_average_norm", "clip_by_global_norm", "clip_by_norm", "clip_by_value", "global_norm"]

Dense = Any  # a tensor or anything TensorFlow converts to one (TensorFlow ships no types)
Gradient = Any  # a tensor or `tf.IndexedSlices`; the result has the same type
_GIVEN = (tf.Tensor, tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)


@with_advice
def clip_by_global_norm(
    t_list: Sequence[Gradient | None], clip_norm: float | Dense, use_norm: Dense | None = None, name: str | None = None
) -> tuple[list[Gradient | None], Dense]:
    """Scale all tensors by min(1, clip_norm / global norm). Return the list of results and the norm before clipping.

    Args:
        t_list: tensors and `tf.IndexedSlices`. None stays None.
        clip_norm: the threshold, >= 0, in the units of the tensors: a number or a scalar tensor.
        use_norm: the global norm, if you already have it. It is not computed again, so the bound is only as exact as
            this value.
        name: ignored.

    Returns:
        A list of new tensors and the norm before clipping. If the norm is not finite, all tensors become NaN.

    Raises:
        TypeError: `t_list` is not a list or tuple.
        ValueError: `clip_norm` is negative or NaN, and its value is known.

    """
    given = _listed(t_list)
    if use_norm is None:
        check_threshold(clip_norm, "clip_norm")
        return clip.clip_by_global_norm(given, clip_norm) if _some(given) else (given, tf.constant(0.0))
    return _scaled(given, clip_norm, use_norm), tf.convert_to_tensor(use_norm)


@with_advice
def global_norm(t_list: Sequence[Gradient | None], name: str | None = None) -> Dense:
    """Return the L2 norm of all tensors together: a float32 scalar, or float64 if one of the tensors is float64."""
    given = _listed(t_list)
    return clip.global_norm(given) if _some(given) else tf.constant(0.0)


@with_subnormals
def clip_by_norm(
    t: Gradient, clip_norm: float | Dense, axes: int | Sequence[int] | None = None, name: str | None = None
) -> Gradient:
    """Scale a tensor by min(1, clip_norm / norm). With `axes`, each slice along these axes has its own norm."""
    given = _gradient(t)
    check_threshold(clip_norm, "clip_norm")
    if axes is None:
        return clip.clip_by_global_norm(given, clip_norm)[0]
    flat, shared = flatten(given), tuple(np.ravel(tf.get_static_value(tf.convert_to_tensor(axes, tf.int32))).tolist())
    clipping = Clipping(None, EUCLIDEAN, PROPAGATE, CLIP)
    dense = flatten(flat.leaves)  # of `tf.IndexedSlices`, `axes` are those of the values
    scopes = scopes_beside(dense, shared, "axes", ["t"])
    return flat.rebuild(clip_by_scopes(dense, [clip_norm], clipping, scopes)[0])


@with_advice
def clip_by_value(
    t: Gradient, clip_value_min: float | Dense, clip_value_max: float | Dense, name: str | None = None
) -> Gradient:
    """Clamp each element of a tensor to [clip_value_min, clip_value_max]. NaN stays NaN.

    If the bounds are the numbers -c and c, they are rounded toward zero in the dtype of the tensor. Integer tensors,
    and all other bounds, including tensors that broadcast, go to `tf.clip_by_value`.
    """
    given, lower, upper = _given(t), clip_value_min, clip_value_max
    numbers = isinstance(lower, int | float) and isinstance(upper, int | float)
    if numbers and -lower == upper >= 0 and not given.dtype.is_integer:
        return clip.clip_by_value(given, upper)
    return tf.clip_by_value(given, lower, upper)


@with_advice
def clip_by_average_norm(t: Dense, clip_norm: float | Dense, name: str | None = None) -> Dense:
    """Scale a tensor by min(1, clip_norm / (norm / number of elements)), as in `tf.compat.v1`."""
    tensor = without_integers(tf.convert_to_tensor(t))
    if None in tensor.shape:
        raise ValueError(
            f"the number of elements of t must be known, got the shape {tensor.shape}. Give tf.TensorSpec a full shape."
        )
    count = elements_of(tensor.shape)
    limit = check_threshold(clip_norm, "clip_norm")
    whole = min(limit * count, math.inf) if isinstance(limit, float) else tf.cast(limit, tf.float64) * count
    return clip.clip_by_global_norm(tensor, whole)[0]


def _listed(t_list: Sequence[Gradient | None]) -> list[Gradient | None]:
    if isinstance(t_list, list | tuple):
        return without_integers([None if t is None else _given(t) for t in t_list])
    raise TypeError(
        f"t_list must be a list or a tuple of tensors, got {typed(t_list)}. "
        "For other containers, call gradclip.clip_by_global_norm."
    )


def _gradient(t: object) -> Gradient:
    """Return a gradient. Raises TypeError for integers, as TensorFlow does."""
    return without_integers(_given(t))


def _given(t: object) -> Gradient:
    return t if isinstance(t, _GIVEN) else tf.convert_to_tensor(t)


def _some(t_list: Sequence[Gradient | None]) -> bool:
    return any(t is not None for t in t_list)


@with_subnormals
def _scaled(t_list: list[Gradient | None], clip_norm: Any, use_norm: Any) -> Any:
    """Scale the tensors to the threshold, given their norm, with operations that tapes and graphs record."""
    flat, backend = flatten(t_list), Graph(visible=tf.executing_eagerly())
    threshold = check_threshold(clip_norm, "clip_norm")
    norm = backend.scalar(check_norm(use_norm, "use_norm", backend=backend), ())
    arrays = backend.enter(prepared(backend, flat))
    spoiled = tf.where(tf.math.is_inf(norm), tf.constant(math.nan, norm.dtype), norm)
    return flat.rebuild(from_norm(backend, spoiled, threshold, arrays).scaled(backend))
