"""The clipping functions of `optax`, on gradclip's engine.

Switch by writing `from gradclip.integrations.optax import clip_by_global_norm`. What differs: the bounds hold exactly,
norms neither overflow nor saturate, and an example with NaN or infinities contributes nothing to a sum.
"""

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from gradclip.arguments import check_threshold
from gradclip.clip import clip_by_global_norm as clip_tree
from gradclip.clip import clip_by_layer_norm, clip_by_value
from gradclip.integrations import needed_for
from gradclip.per_example.clip import per_example_clip
from gradclip.typing import Tree

with needed_for("optax"):
    import jax
    import jax.numpy as jnp
    import optax

    from gradclip.backends.jax.host import in_host_memory
    from gradclip.backends.jax.traced import Jax
    from gradclip.backends.jax.trees import recognizer

__all__ = [
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
]


def clip_by_global_norm(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clips updates by their global norm, so that it is at most `max_norm`.

    Errors are those of `gradclip.clip_by_global_norm`; the signature is that of optax 0.2.

    >>> transform = clip_by_global_norm(1.0)
    >>> updates, _ = transform.update({"w": jnp.array([3.0, 4.0])}, transform.init(None))
    >>> [round(float(x), 4) for x in updates["w"]]
    [0.6, 0.8]
    """
    check_threshold(max_norm)
    return _stateless(lambda updates: clip_tree(updates, max_norm)[0])


def clip(max_delta: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clamps each element of the updates to [-max_delta, max_delta].

    Errors are those of `gradclip.clip_by_value`; the signature is that of optax 0.2.
    """
    check_threshold(max_delta, "max_delta")
    return _stateless(lambda updates: clip_by_value(updates, max_delta))


def clip_by_block_rms(threshold: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clips each leaf so that its root mean square is at most `threshold`.

    That is clipping by the leaf's norm to threshold * sqrt(size). Errors are those of `gradclip.clip_by_layer_norm`;
    the signature is that of optax 0.2.
    """
    check_threshold(threshold, "threshold")

    def update(updates: optax.Updates) -> optax.Updates:
        sizes = jax.tree.map(lambda u: math.prod(jnp.shape(u)), updates, is_leaf=recognizer())
        thresholds = jax.tree.map(lambda size: _times_root(threshold, max(1, size)), sizes)
        return clip_by_layer_norm(updates, thresholds)[0]

    return _stateless(update)


def _times_root(threshold: jax.typing.ArrayLike, size: int) -> float | jax.Array:
    """Return threshold * sqrt(size), or a number just below it."""
    if isinstance(threshold, jax.Array) and not in_host_memory(threshold):
        return _traced_times_root(threshold, size)
    number = check_threshold(float(threshold), "threshold")
    product = number if math.isinf(number) else min(number * math.sqrt(size), sys.float_info.max)
    above = math.isfinite(number) and Fraction(product) ** 2 > size * Fraction(number) ** 2
    return math.nextafter(product, 0.0) if above else product


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _traced_times_root(threshold: jax.Array, size: int) -> jax.Array:
    backend = Jax(visible=False)
    like = jnp.zeros((), jnp.promote_types(threshold.dtype, jnp.float32))
    root = math.sqrt(size)
    if math.frexp(root)[0] != 0.5:
        root *= 1.0 - 8.0 * backend.wide.roundoff
    with backend.precision():
        wide = backend.scalar(threshold, [])
        product = backend.narrow(jnp.minimum(wide * root, float(jnp.finfo(like.dtype).max)), like)
        return jnp.where(jnp.isinf(wide), wide.astype(like.dtype), product)


@_traced_times_root.defjvp
def _(size: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    product = _traced_times_root(*primals, size)
    if tangents[0].dtype == jax.dtypes.float0:
        return product, jnp.zeros_like(product)
    return product, tangents[0].astype(product.dtype) * math.sqrt(size)


def per_example_global_norm_clip(grads: Tree, l2_norm_clip: jax.typing.ArrayLike) -> tuple[Tree, jax.Array]:
    """Return the sum of the examples' gradients, each clipped by its global norm, and how many were clipped.

    `grads`' leaves carry the batch on axis 0. Errors are those of `gradclip.per_example_clip`; the signature is that
    of optax 0.2.

    >>> grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    >>> per_example_global_norm_clip(grads, 1.25)
    ([Array([1.75, 1.75, 1.75], dtype=float32)], Array(3, dtype=int32))
    """
    check_threshold(l2_norm_clip, "l2_norm_clip")
    summed, info = per_example_clip(jax.tree.map(jnp.asarray, grads), l2_norm_clip)
    return summed, info.num_clipped


def per_example_layer_norm_clip(
    grads: Tree, global_l2_norm_clip: jax.typing.ArrayLike, uniform: bool = True
) -> tuple[Tree, Tree]:
    """Return the sum of the examples' gradients, clipped leaf by leaf, and how many were clipped in each leaf.

    Leaf i of K is clipped to C / sqrt(K) (`uniform`) or to C * sqrt(D_i / D), D_i of the D elements of an example
    being its own. Errors are those of `gradclip.per_example_clip`; the signature is that of optax 0.2.

    >>> grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    >>> per_example_layer_norm_clip(grads, 0.0)
    ([Array([0., 0., 0.], dtype=float32)], [Array(3, dtype=int32)])
    """
    check_threshold(global_l2_norm_clip, "global_l2_norm_clip")
    arrays = jax.tree.map(jnp.asarray, grads)
    summed, info = per_example_clip(arrays, global_l2_norm_clip, per_layer=True, uniform=uniform)
    return summed, info.num_clipped


def _stateless(update: Callable[[optax.Updates], optax.Updates]) -> optax.GradientTransformation:
    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        return update(jax.tree.map(jnp.asarray, updates)), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)
