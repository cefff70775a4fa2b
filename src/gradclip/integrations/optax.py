"""Drop-in replacements for the clipping functions of `optax`.

To switch, write `from gradclip.integrations.optax import clip_by_global_norm`. What differs from optax: the bounds hold
exactly, norms neither overflow nor saturate, and an example with NaN or infinities contributes nothing to a sum.

Two transformations are new. `adaptive_clip_by_global_norm` clips to a threshold that adapts to recent norms.
`skip_spikes` also skips the optimizer's step when a norm is far above that threshold.
"""

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from gradclip.adaptive.quantile import NormHistory, QuantileThreshold
from gradclip.adaptive.settings import check_between
from gradclip.arguments import check_threshold
from gradclip.clip import clip_by_global_norm as clip_tree
from gradclip.clip import clip_by_layer_norm, clip_by_value, global_norm
from gradclip.clip_units import clip_adaptively
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order
from gradclip.integrations import needed_for
from gradclip.leaves import as_floats, without_integers
from gradclip.per_example.clip import per_example_clip
from gradclip.typing import AxisName, Ord, Policy, Tree

with needed_for("optax", "jax"):
    import jax
    import jax.numpy as jnp
    import optax

    from gradclip.backends.jax.host import in_host_memory
    from gradclip.backends.jax.operations import either
    from gradclip.backends.jax.placement import typed_as
    from gradclip.backends.jax.traced import Jax
    from gradclip.backends.jax.trees import recognizer

__all__ = [
    "AdaptiveClipState",
    "NormState",
    "SkipSpikesState",
    "adaptive_clip_by_global_norm",
    "adaptive_grad_clip",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_global_norm_with_state",
    "per_example_global_norm_clip",
    "per_example_layer_norm_clip",
    "skip_spikes",
]


def clip_by_global_norm(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clips the global norm of the updates to `max_norm`.

    Errors are those of `gradclip.clip_by_global_norm`. The signature is that of optax 0.2.

    >>> transform = clip_by_global_norm(1.0)
    >>> updates, _ = transform.update({"w": jnp.array([3.0, 4.0])}, transform.init(None))
    >>> [round(float(x), 4) for x in updates["w"]]
    [0.6, 0.8]
    """
    check_threshold(max_norm)
    return _stateless(lambda updates: clip_tree(without_integers(updates), max_norm)[0])


class NormState(NamedTuple):
    """The norm and the threshold of the last update. Pass both to `gradclip.Monitor.record`.

    Attributes:
        norm: the norm before clipping.
        max_norm: the threshold.
    """

    norm: jax.Array
    max_norm: jax.Array


def clip_by_global_norm_with_state(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return the transformation of `clip_by_global_norm`, with the last norm in its state (a `NormState`).

    >>> transform = clip_by_global_norm_with_state(1.0)
    >>> grads = {"w": jnp.array([3.0, 4.0])}
    >>> updates, state = transform.update(grads, transform.init(grads))
    >>> float(state.norm), float(state.max_norm)
    (5.0, 1.0)
    """
    check_threshold(max_norm)

    def init(params: optax.Params) -> NormState:
        like = jax.eval_shape(global_norm, jax.tree.map(jnp.asarray, params))
        return NormState(jnp.zeros((), like.dtype), jnp.asarray(max_norm, like.dtype))

    def update(
        updates: optax.Updates, state: NormState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NormState]:
        clipped, norm = clip_tree(without_integers(jax.tree.map(jnp.asarray, updates)), max_norm)
        return clipped, NormState(norm.astype(state.norm.dtype), jnp.asarray(max_norm, state.max_norm.dtype))

    return optax.GradientTransformation(init, update)


def clip(max_delta: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clamps each element of the updates to [-max_delta, max_delta].

    Errors are those of `gradclip.clip_by_value`. The signature is that of optax 0.2.
    """
    check_threshold(max_delta, "max_delta")
    return _stateless(lambda updates: clip_by_value(as_floats(updates), max_delta))


def adaptive_grad_clip(
    clipping: jax.typing.ArrayLike, eps: jax.typing.ArrayLike = 1e-3, axis: int | tuple[int, ...] | None = None
) -> optax.GradientTransformation:
    """Return a transformation that clips each unit of the updates to clipping * max(norm of its parameters, eps).

    Pass the parameters to `update`. Elements along `axis` share a norm, in every leaf. None chooses the axes from JAX's
    layouts, as in `gradclip.clip_by_unit_norm`. With `optax.inject_hyperparams`, a number needs `static_args="axis"`.
    Errors are those of `gradclip.adaptive_grad_clip`. The signature is that of optax 0.2.

    >>> transform = adaptive_grad_clip(0.1)
    >>> params, updates = jnp.array([[6.0, 60.0], [8.0, 80.0]]), jnp.array([[3.0, 0.5], [4.0, 0.5]])
    >>> clipped, _ = transform.update(updates, transform.init(params), params)
    >>> [[round(float(x), 4) for x in row] for row in clipped]
    [[0.6, 0.5], [0.8, 0.5]]
    """
    check_threshold(clipping, "clipping")
    check_threshold(eps, "eps")
    axis = _known("axis", axis)

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


class AdaptiveClipState(NamedTuple):
    """The state of `adaptive_clip_by_global_norm`.

    Attributes:
        history: the recent norms, which determine the next threshold.
        norm: the norm before clipping at the last step.
        max_norm: the threshold at the last step.
        clipped: the number of steps clipped so far.
        skipped: the number of steps skipped so far.
    """

    history: NormHistory
    norm: jax.Array
    max_norm: jax.Array
    clipped: jax.Array
    skipped: jax.Array


class SkipSpikesState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
        clip: the norm, the threshold and the counts.
        inner: the optimizer's state.
    """

    clip: AdaptiveClipState
    inner: optax.OptState


def adaptive_clip_by_global_norm(
    rule: QuantileThreshold | None = None,
    *,
    ord: Ord = None,
    nonfinite: Policy = "propagate",
    skip_above: float = math.inf,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Return a transformation that clips the global norm of the updates to a threshold that adapts to recent norms.

    Args:
        rule: how the threshold is computed. None means `gradclip.QuantileThreshold()`, which documents the formula.
        ord: the order of the norm, as in `gradclip.global_norm`; None means 2. With `optax.inject_hyperparams`, a
            number needs `static_args="ord"`.
        nonfinite: what to do with NaN and infinities, as in `gradclip.clip_by_global_norm`. They never change the
            threshold.
        skip_above: if the norm is more than `skip_above` times the threshold, the updates become zeros. At least 1;
            `inf` never skips. The optimizer still takes a step, with zeros. To skip its step, use `skip_spikes`.
        axis_name: the mesh axes over which the updates are sharded, as in `gradclip.global_norm`. The state is then the
            same on all devices.

    The state is an `AdaptiveClipState`: the norm before clipping and the threshold of the last step, and the numbers of
    steps clipped and skipped. Errors are those of `gradclip.clip_by_global_norm`.

    >>> transform = adaptive_clip_by_global_norm()
    >>> state = transform.init({"w": jnp.zeros(2)})
    >>> for gradient in ([3.0, 4.0], [30.0, 40.0]):
    ...     updates, state = transform.update({"w": jnp.array(gradient)}, state)
    >>> [round(float(x), 4) for x in updates["w"]], float(state.norm), float(state.max_norm), int(state.clipped)
    ([6.0, 8.0], 50.0, 10.0, 1)
    """
    rule, policy = QuantileThreshold.given(rule), Nonfinite.named(nonfinite)
    order, most = Order.parse(_known("ord", ord)), _factor(skip_above)

    def update(
        updates: optax.Updates, state: AdaptiveClipState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdaptiveClipState]:
        updates = jax.tree.map(jnp.asarray, updates)
        threshold = rule.max_norm(state.history)
        clipped, norm = clip_tree(updates, threshold, ord=order.p, nonfinite=nonfinite, axis_name=axis_name)
        spike = jnp.zeros(jnp.shape(norm), bool)
        if not isinstance(most, float) or most < math.inf:
            spike = _spikes(norm, threshold, most) & (jnp.isfinite(norm) | _all_finite(clipped, axis_name))
            clipped = jax.tree.map(partial(_zeros_where, spike), clipped)
        skipped = spike | (~jnp.isfinite(norm) & policy.blanks)
        return clipped, _observed(rule, state, norm, threshold, skipped)

    return optax.GradientTransformation(lambda params: _nothing_observed(rule, params), update)


def skip_spikes(
    tx: optax.GradientTransformation,
    rule: QuantileThreshold | None = None,
    *,
    ord: Ord = None,
    skip_above: float = 4.0,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer: skip the steps with norm spikes, and clip the others to an adaptive threshold.

    Args:
        tx: the optimizer. When a step is skipped, its state does not change (moments and counts included), and the
            updates are zeros.
        rule: how the threshold is computed. None means `gradclip.QuantileThreshold()`, which documents the formula.
        ord: the order of the norm, as in `adaptive_clip_by_global_norm`.
        skip_above: skip a step if the norm is NaN, infinite, or more than `skip_above` times the threshold. At least 1.
            With 1 nothing is clipped: steps are skipped instead. The finite norms of skipped steps enter the history,
            so a lasting new level is accepted after `rule.recovery_steps`.
        axis_name: the mesh axes over which the updates are sharded, as in `gradclip.global_norm`. All devices then skip
            the same steps.

    The state is a `SkipSpikesState`.

    >>> optimizer = skip_spikes(optax.sgd(1.0))
    >>> state = optimizer.init(jnp.zeros(2))
    >>> for gradient in ([3.0, 4.0], [300.0, 400.0]):
    ...     updates, state = optimizer.update(jnp.array(gradient), state)
    >>> updates.tolist(), int(state.clip.skipped)
    ([0.0, 0.0], 1)
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"tx must be an optimizer of optax, got {tx!r:.80} of type {type(tx).__name__}. Pass it first, such as "
            "skip_spikes(optax.adam(1e-3), skip_above=4.0)."
        )
    rule, inner = QuantileThreshold.given(rule), optax.with_extra_args_support(tx)
    order, most = Order.parse(_known("ord", ord)), _factor(skip_above)

    def init(params: optax.Params) -> SkipSpikesState:
        return SkipSpikesState(_nothing_observed(rule, params), inner.init(params))

    def update(
        updates: optax.Updates, state: SkipSpikesState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, SkipSpikesState]:
        updates = jax.tree.map(jnp.asarray, updates)
        threshold, norm = rule.max_norm(state.clip.history), global_norm(updates, order, axis_name=axis_name)
        skipped = _spikes(norm, threshold, most) | ~jnp.isfinite(norm)  # also NaN

        def step() -> tuple[optax.Updates, optax.OptState]:
            clipped = clip_tree(updates, threshold, ord=order.p, axis_name=axis_name)[0]
            return inner.update(clipped, state.inner, params, **extra)

        def nothing() -> tuple[optax.Updates, optax.OptState]:
            made, left = jax.eval_shape(step)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
            # Both branches must return the same types.
            return jax.tree.map(typed_as, zeros, made), jax.tree.map(typed_as, state.inner, left)

        made, left = either(skipped, nothing, step)
        return made, SkipSpikesState(_observed(rule, state.clip, norm, threshold, skipped), left)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros_where(spike: jax.Array, x: jax.Array) -> jax.Array:
    # Integers are the indices of sparse leaves: keep them.
    return jnp.where(spike, 0, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _nothing_observed(rule: QuantileThreshold, params: optax.Params) -> AdaptiveClipState:
    wide = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in jax.tree.leaves(params))
    number = jnp.zeros((), jnp.float64 if wide else jnp.float32)
    history = rule.init(number)
    # Do not share buffers between fields, so that the state can be donated.
    clipped, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    return AdaptiveClipState(history, number, rule.max_norm(history), clipped, skipped)


def _known(name: str, value: Any) -> Any:
    """Return a setting that decides what is traced. `optax.inject_hyperparams` makes numbers arrays."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be known while JAX traces, got a traced array. With optax.inject_hyperparams, pass "
            f"static_args={name!r}."
        )
    return value.item() if isinstance(value, jax.Array) else value


def _factor(skip_above: Any) -> float | jax.Array:
    """Return a checked `skip_above`. A traced number below 1 counts as 1."""
    if isinstance(skip_above, jax.core.Tracer):
        return jnp.maximum(skip_above, 1)
    return check_between("skip_above", _known("skip_above", skip_above), 1.0, math.inf)


def _spikes(norm: jax.Array, threshold: jax.Array, skip_above: float | jax.Array) -> jax.Array:
    # An infinite norm may be that of finite updates, too large for the dtype of norms.
    return norm > threshold * jnp.asarray(skip_above, threshold.dtype)


def _all_finite(clipped: optax.Updates, axis_name: AxisName) -> jax.Array | bool:
    """Say whether updates were finite before they were clipped. If one was not, all are NaN, or else they are zeros."""
    leaves = (x for x in jax.tree.leaves(clipped) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size)
    finite = next((~jnp.isnan(x.reshape(-1)[0]) for x in leaves), None)
    if finite is None or axis_name is None:
        return finite is None or finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0  # JAX cannot tell that all devices say the same


def _observed(
    rule: QuantileThreshold, state: AdaptiveClipState, norm: jax.Array, threshold: jax.Array, skipped: jax.Array
) -> AdaptiveClipState:
    clipped = (norm > threshold) & jnp.isfinite(norm) & ~skipped
    return AdaptiveClipState(
        rule.observe(state.history, norm),
        norm.astype(state.norm.dtype),
        threshold,
        state.clipped + clipped.astype(jnp.int32),
        state.skipped + skipped.astype(jnp.int32),
    )
