"""Drop-in replacements for the clipping functions of `optax`.

To switch, write `from gradclip.integrations.optax import clip_by_global_norm`. What differs from optax: the bounds hold
exactly, norms neither overflow nor saturate, and an example with NaN or infinities contributes nothing to a sum.

Three transformations are new. `adaptive_clip_by_global_norm` clips to a threshold that adapts to recent norms, and
`adaptive_clip_by_layer_norm` each leaf to one that adapts to its own. `skip_spikes` also skips the optimizer's step
when a norm is far above that threshold.
"""

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from gradclip._src.annotations import Tree, Where
from gradclip._src.backends.imported import needed_for
from gradclip._src.functional.clip import clip_adaptively, clip_by_layer_norm, clip_by_value, global_norm
from gradclip._src.functional.clip import clip_by_global_norm as clip_tree
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.passed.leaves import as_floats, without_integers
from gradclip._src.private.sums.clip import per_example_clip
from gradclip._src.words import with_advice

with needed_for("optax", "jax"):
    import jax
    import jax.numpy as jnp
    import optax

    from gradclip._src.backends.jax.host import in_host_memory
    from gradclip._src.backends.jax.traced import JaxTraced
    from gradclip._src.backends.jax.trees import recognizer
    from gradclip.integrations._optax_adaptive import (
        AdaptiveClipState,
        LayerClipState,
        SkipSpikesState,
        adaptive_clip_by_global_norm,
        adaptive_clip_by_layer_norm,
        setting_known,
        skip_spikes,
    )

__all__ = [
    "AdaptiveClipState",
    "LayerClipState",
    "NormState",
    "SkipSpikesState",
    "adaptive_clip_by_global_norm",
    "adaptive_clip_by_layer_norm",
    "adaptive_grad_clip",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_global_norm_with_state",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
    "skip_spikes",
]


@with_advice
def clip_by_global_norm(
    max_norm: jax.typing.ArrayLike | optax.Schedule, *, where: Where = None
) -> optax.GradientTransformation:
    """Return a transformation that clips the global norm of the updates to `max_norm`.

    A schedule as `max_norm` is what `optax.inject_hyperparams` makes of it, which keeps the threshold in its state.
    `where` says which updates count, as in `gradclip.global_norm`; the others, such as those of frozen parameters, stay
    as they are. Errors are those of `gradclip.clip_by_global_norm`. Otherwise the signature is that of optax 0.2.

    >>> transform = clip_by_global_norm(1.0)
    >>> grads = {"w": jnp.array([3.0, 4.0])}
    >>> updates, _ = transform.update(grads, transform.init(None))
    >>> [round(float(x), 4) for x in updates["w"]]
    [0.6, 0.8]
    """
    if callable(max_norm):
        return _scheduled(clip_by_global_norm, max_norm, where)
    check_threshold(max_norm)
    return _stateless(lambda updates: clip_tree(without_integers(updates), max_norm, where=where)[0])


def _scheduled(make: Callable[..., Any], max_norm: optax.Schedule, where: Where) -> optax.GradientTransformation:
    return optax.inject_hyperparams(make, static_args="where")(max_norm=max_norm, where=where)


class NormState(NamedTuple):
    """The norm and the threshold of the last update. Pass both to `gradclip.Monitor.record`.

    Attributes:
        norm: the norm before clipping.
        max_norm: the threshold.
    """

    norm: jax.Array
    max_norm: jax.Array


@with_advice
def clip_by_global_norm_with_state(
    max_norm: jax.typing.ArrayLike | optax.Schedule, *, where: Where = None
) -> optax.GradientTransformation:
    """Return the transformation of `clip_by_global_norm`, with the last norm in its state (a `NormState`).

    With a schedule as `max_norm`, this is the `inner_state` of its state.

    >>> transform = clip_by_global_norm_with_state(1.0)
    >>> grads = {"w": jnp.array([3.0, 4.0])}
    >>> updates, state = transform.update(grads, transform.init(grads))
    >>> float(state.norm), float(state.max_norm)
    (5.0, 1.0)
    """
    if callable(max_norm):
        return _scheduled(clip_by_global_norm_with_state, max_norm, where)
    check_threshold(max_norm)

    def init(params: optax.Params) -> NormState:
        like = jax.eval_shape(partial(global_norm, where=where), jax.tree.map(jnp.asarray, params))
        return NormState(jnp.zeros((), like.dtype), jnp.asarray(max_norm, like.dtype))

    def update(
        updates: optax.Updates, state: NormState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NormState]:
        clipped, norm = clip_tree(without_integers(jax.tree.map(jnp.asarray, updates)), max_norm, where=where)
        return clipped, NormState(norm.astype(state.norm.dtype), jnp.asarray(max_norm, state.max_norm.dtype))

    return optax.GradientTransformation(init, update)


@with_advice
def clip(max_delta: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clamps each element of the updates to [-max_delta, max_delta].

    Errors are those of `gradclip.clip_by_value`. The signature is that of optax 0.2.
    """
    check_threshold(max_delta, "max_delta")
    return _stateless(lambda updates: clip_by_value(as_floats(updates), max_delta))


@with_advice
def adaptive_grad_clip(
    clipping: jax.typing.ArrayLike, eps: jax.typing.ArrayLike = 1e-3, axis: int | tuple[int, ...] | None = None
) -> optax.GradientTransformation:
    """Return a transformation that clips each unit of the updates to clipping * max(norm of its parameters, eps).

    Pass the parameters to `update`. Elements along `axis` share a norm, in every leaf. None chooses the axes from JAX's
    layouts, as in `gradclip.clip_by_unit_norm`. With `optax.inject_hyperparams`, a number needs `static_args="axis"`.
    Errors are those of `gradclip.adaptive_grad_clip`. The signature is that of optax 0.2.

    >>> transform = adaptive_grad_clip(0.1)
    >>> params = jnp.array([[6.0, 60.0], [8.0, 80.0]])
    >>> updates = jnp.array([[3.0, 0.5], [4.0, 0.5]])
    >>> clipped, _ = transform.update(updates, transform.init(params), params)
    >>> [[round(float(x), 4) for x in row] for row in clipped]
    [[0.6, 0.5], [0.8, 0.5]]
    """
    check_threshold(clipping, "clipping")
    check_threshold(eps, "eps")
    axis = setting_known("axis", axis)

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if params is None:
            raise ValueError(
                "params is missing: adaptive_grad_clip compares updates with parameters. Call update(updates, state, "
                "params)."
            )
        arrays, params = (as_floats(jax.tree.map(jnp.asarray, tree)) for tree in (updates, params))
        return clip_adaptively(arrays, params, clipping, eps, shared_axes=axis)[0], state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@with_advice
def clip_by_block_rms(threshold: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clips the root mean square of each leaf to `threshold`.

    It clips the leaf's norm to threshold * sqrt(size). Errors are those of `gradclip.clip_by_layer_norm`. The signature
    is that of optax 0.2.
    """
    check_threshold(threshold, "threshold")

    def update(updates: optax.Updates) -> optax.Updates:
        sizes = jax.tree.map(lambda u: math.prod(jnp.shape(u)), updates, is_leaf=recognizer())
        thresholds = jax.tree.map(lambda size: _times_root(threshold, max(1, size)), sizes)
        return clip_by_layer_norm(as_floats(updates), thresholds)[0]

    return _stateless(update)


def _times_root(threshold: jax.typing.ArrayLike, size: int) -> float | jax.Array:
    """Return threshold * sqrt(size), or slightly less, but never more."""
    if isinstance(threshold, jax.Array) and not in_host_memory(threshold):
        return _traced_times_root(threshold, size)
    number = check_threshold(float(threshold), "threshold")
    product = number if math.isinf(number) else min(number * math.sqrt(size), sys.float_info.max)
    above = math.isfinite(number) and Fraction(product) ** 2 > size * Fraction(number) ** 2
    return math.nextafter(product, 0.0) if above else product


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _traced_times_root(threshold: jax.Array, size: int) -> jax.Array:
    backend = JaxTraced(visible=False)
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


@with_advice
def per_example_global_norm_clip(grads: Tree, l2_norm_clip: jax.typing.ArrayLike) -> tuple[Tree, jax.Array]:
    """Clip each example's gradient by its global norm. Return the sum over examples and the number clipped.

    The leaves of `grads` carry the batch on axis 0. Errors are those of `gradclip.per_example_clip`. The signature is
    that of optax 0.2.

    >>> grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    >>> per_example_global_norm_clip(grads, 1.25)
    ([Array([1.75, 1.75, 1.75], dtype=float32)], Array(3, dtype=int32))
    """
    check_threshold(l2_norm_clip, "l2_norm_clip")
    summed, info = per_example_clip(as_floats(jax.tree.map(jnp.asarray, grads)), l2_norm_clip)
    return summed, info.num_clipped


@with_advice
def per_example_layer_norm_clip(
    grads: Tree, global_l2_norm_clip: jax.typing.ArrayLike, uniform: bool = True
) -> tuple[Tree, Tree]:
    """Clip each example's gradient leaf by leaf. Return the sum over examples and the number clipped in each leaf.

    C is `global_l2_norm_clip`. With `uniform`, each of the K leaves is clipped to C / sqrt(K). Otherwise leaf i is
    clipped to C * sqrt(D_i / D), where D_i is its number of elements and D that of the whole example. Errors are those
    of `gradclip.per_example_clip`. The signature is that of optax 0.2.

    >>> grads = [jnp.array([[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])]
    >>> per_example_layer_norm_clip(grads, 0.0)
    ([Array([0., 0., 0.], dtype=float32)], [Array(3, dtype=int32)])
    """
    check_threshold(global_l2_norm_clip, "global_l2_norm_clip")
    arrays = as_floats(jax.tree.map(jnp.asarray, grads))
    summed, info = per_example_clip(arrays, global_l2_norm_clip, per_layer=True, uniform=uniform)
    return summed, info.num_clipped


def _stateless(update: Callable[[optax.Updates], optax.Updates]) -> optax.GradientTransformation:
    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        return update(jax.tree.map(jnp.asarray, updates)), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)
