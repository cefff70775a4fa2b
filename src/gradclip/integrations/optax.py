"""The clipping functions of `optax`, on gradclip's engine.

Switch by writing `from gradclip.integrations.optax import clip_by_global_norm`. What differs: the bounds hold exactly,
norms neither overflow nor saturate, and an example with NaN or infinities contributes nothing to a sum.

Two more transformations have a threshold that follows the norms: `adaptive_clip_by_global_norm`, and `skip_spikes`,
which leaves out steps of an optimizer.
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
from gradclip.per_example.clip import per_example_clip
from gradclip.typing import AxisName, Ord, Policy, Tree

with needed_for("optax"):
    import jax
    import jax.numpy as jnp
    import optax

    from gradclip.backends.jax.axes import typed_as
    from gradclip.backends.jax.host import in_host_memory
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
    """Return a transformation that clips updates by their global norm, so that it is at most `max_norm`.

    Errors are those of `gradclip.clip_by_global_norm`; the signature is that of optax 0.2.

    >>> transform = clip_by_global_norm(1.0)
    >>> updates, _ = transform.update({"w": jnp.array([3.0, 4.0])}, transform.init(None))
    >>> [round(float(x), 4) for x in updates["w"]]
    [0.6, 0.8]
    """
    check_threshold(max_norm)
    return _stateless(lambda updates: clip_tree(updates, max_norm)[0])


class NormState(NamedTuple):
    """The norm before clipping and the threshold of the last update, as `gradclip.Monitor.record` takes them."""

    norm: jax.Array
    max_norm: jax.Array


def clip_by_global_norm_with_state(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return the same transformation as `clip_by_global_norm`, but with the last norm in its state, a `NormState`.

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
        clipped, norm = clip_tree(jax.tree.map(jnp.asarray, updates), max_norm)
        return clipped, NormState(norm.astype(state.norm.dtype), state.max_norm)

    return optax.GradientTransformation(init, update)


def clip(max_delta: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return a transformation that clamps each element of the updates to [-max_delta, max_delta].

    Errors are those of `gradclip.clip_by_value`; the signature is that of optax 0.2.
    """
    check_threshold(max_delta, "max_delta")
    return _stateless(lambda updates: clip_by_value(updates, max_delta))


def adaptive_grad_clip(
    clipping: jax.typing.ArrayLike, eps: jax.typing.ArrayLike = 1e-3, axis: int | tuple[int, ...] | None = None
) -> optax.GradientTransformation:
    """Return a transformation that clips each unit of the updates to clipping * max(norm of its parameters, eps).

    `update` needs the parameters. `axis` says along which axes of every leaf elements share a norm; None is for the
    layouts of JAX, as in `gradclip.clip_by_unit_norm`. Errors are those of `gradclip.adaptive_grad_clip`; the signature
    is that of optax 0.2.

    >>> transform = adaptive_grad_clip(0.1)
    >>> params, updates = jnp.array([[6.0, 60.0], [8.0, 80.0]]), jnp.array([[3.0, 0.5], [4.0, 0.5]])
    >>> clipped, _ = transform.update(updates, transform.init(params), params)
    >>> [[round(float(x), 4) for x in row] for row in clipped]
    [[0.6, 0.5], [0.8, 0.5]]
    """
    check_threshold(clipping, "clipping")
    check_threshold(eps, "eps")

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if params is None:
            raise ValueError(
                "adaptive_grad_clip compares updates with parameters: call update(updates, state, params) with them."
            )
        arrays = jax.tree.map(jnp.asarray, updates)
        return clip_adaptively(arrays, params, clipping, eps, shared_axes=axis)[0], state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


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


class AdaptiveClipState(NamedTuple):
    """The state of `adaptive_clip_by_global_norm`: the norm before clipping and the threshold are of the last step."""

    history: NormHistory
    norm: jax.Array
    max_norm: jax.Array
    clipped: jax.Array
    skipped: jax.Array


class SkipSpikesState(NamedTuple):
    """The state of `skip_spikes`: that of its clipping, and that of the optimizer."""

    clip: AdaptiveClipState
    inner: optax.OptState


def adaptive_clip_by_global_norm(
    rule: QuantileThreshold | None = None,
    *,
    ord: Ord = 2,
    nonfinite: Policy = "propagate",
    skip_above: float = math.inf,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Return a transformation that clips updates by their global norm, to a threshold that follows from the norms.

    Args:
        rule: how the threshold follows; None means `gradclip.QuantileThreshold()`, which has the formula.
        ord: which norm, as in `gradclip.global_norm`.
        nonfinite: what to do with NaN and infinities, as in `gradclip.clip_by_global_norm`. They change no threshold.
        skip_above: updates become zeros if their norm is more than `skip_above` times the threshold; at least 1, `inf`
            skips none. The optimizer takes a step of zeros then: `skip_spikes` leaves it out.
        axis_name: over which mesh axes the updates are split, as in `gradclip.global_norm`. The state is the same on
            all devices then.

    Its state, an `AdaptiveClipState`, has the norm before clipping and the threshold of the last step, and how many
    steps were clipped and skipped. Errors are those of `gradclip.clip_by_global_norm`.

    >>> transform = adaptive_clip_by_global_norm()
    >>> state = transform.init({"w": jnp.zeros(2)})
    >>> for gradient in ([3.0, 4.0], [30.0, 40.0]):
    ...     updates, state = transform.update({"w": jnp.array(gradient)}, state)
    >>> [round(float(x), 4) for x in updates["w"]], float(state.norm), float(state.max_norm), int(state.clipped)
    ([6.0, 8.0], 50.0, 10.0, 1)
    """
    rule, policy = QuantileThreshold.given(rule), Nonfinite.named(nonfinite)
    order, most = Order.parse(ord), check_between("skip_above", skip_above, 1.0, math.inf)

    def update(
        updates: optax.Updates, state: AdaptiveClipState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdaptiveClipState]:
        updates = jax.tree.map(jnp.asarray, updates)
        threshold = rule.max_norm(state.history)
        clipped, norm = clip_tree(updates, threshold, ord=order.p, nonfinite=nonfinite, axis_name=axis_name)
        spike = _spikes(norm, threshold, most)
        if most < math.inf:
            clipped = jax.tree.map(partial(_zeros_where, spike), clipped)
        skipped = spike | (~jnp.isfinite(norm) & policy.blanks)
        return clipped, _observed(rule, state, norm, threshold, skipped)

    return optax.GradientTransformation(lambda params: _nothing_observed(rule, params), update)


def skip_spikes(
    tx: optax.GradientTransformation,
    rule: QuantileThreshold | None = None,
    *,
    ord: Ord = 2,
    skip_above: float = 4.0,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that leaves out the steps of spikes, and clips the others to a threshold that follows.

    Args:
        tx: the optimizer. In a step that is left out its state stays as it was, moments and counts too, and the updates
            are zeros.
        rule: how the threshold follows; None means `gradclip.QuantileThreshold()`, which has the formula.
        ord: which norm, as in `gradclip.global_norm`.
        skip_above: a step is left out if the norm is more than `skip_above` times the threshold, or NaN, or infinite;
            at least 1. With 1 nothing is clipped: what would be is left out. Norms that are left out count as observed,
            so that a level that lasts is accepted, after `rule.recovery_steps`.
        axis_name: over which mesh axes the updates are split, as in `gradclip.global_norm`: one device leaves a step
            out where all do.

    Its state is a `SkipSpikesState`.

    >>> optimizer = skip_spikes(optax.sgd(1.0))
    >>> state = optimizer.init(jnp.zeros(2))
    >>> for gradient in ([3.0, 4.0], [300.0, 400.0]):
    ...     updates, state = optimizer.update(jnp.array(gradient), state)
    >>> updates.tolist(), int(state.clip.skipped)
    ([0.0, 0.0], 1)
    """
    rule, inner = QuantileThreshold.given(rule), optax.with_extra_args_support(tx)
    order, most = Order.parse(ord), check_between("skip_above", skip_above, 1.0, math.inf)

    def init(params: optax.Params) -> SkipSpikesState:
        return SkipSpikesState(_nothing_observed(rule, params), inner.init(params))

    def update(
        updates: optax.Updates, state: SkipSpikesState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, SkipSpikesState]:
        updates = jax.tree.map(jnp.asarray, updates)
        threshold, norm = rule.max_norm(state.clip.history), global_norm(updates, order, axis_name=axis_name)
        skipped = _spikes(norm, threshold, most) | ~jnp.isfinite(norm)

        def step() -> tuple[optax.Updates, optax.OptState]:
            clipped = clip_tree(updates, threshold, ord=order.p, axis_name=axis_name)[0]
            return inner.update(clipped, state.inner, params, **extra)

        def nothing() -> tuple[optax.Updates, optax.OptState]:
            made, left = jax.eval_shape(step)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
            # Both branches must agree in the types of all that they return.
            return jax.tree.map(typed_as, zeros, made), jax.tree.map(typed_as, state.inner, left)

        if isinstance(skipped, jax.core.Tracer):
            made, left = jax.lax.cond(skipped, nothing, step)
        else:  # which JAX would compile anew for every step
            made, left = nothing() if skipped else step()
        return made, SkipSpikesState(_observed(rule, state.clip, norm, threshold, skipped), left)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros_where(spike: jax.Array, x: jax.Array) -> jax.Array:
    # Integers are the indices of sparse leaves.
    return jnp.where(spike, 0, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _nothing_observed(rule: QuantileThreshold, params: optax.Params) -> AdaptiveClipState:
    wide = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in jax.tree.leaves(params))
    number = jnp.zeros((), jnp.float64 if wide else jnp.float32)
    history = rule.init(number)
    # Each has memory of its own, so that the state can be donated.
    clipped, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    return AdaptiveClipState(history, number, rule.max_norm(history), clipped, skipped)


def _spikes(norm: jax.Array, threshold: jax.Array, skip_above: float) -> jax.Array:
    return (norm > threshold * skip_above) & jnp.isfinite(norm)


def _observed(
    rule: QuantileThreshold, state: AdaptiveClipState, norm: jax.Array, threshold: jax.Array, skipped: jax.Array
) -> AdaptiveClipState:
    clipped = (norm > threshold) & jnp.isfinite(norm) & ~skipped
    return AdaptiveClipState(
        rule.observe(state.history, norm),
        norm.astype(state.norm.dtype),
        threshold,
        state.clipped + clipped,
        state.skipped + skipped,
    )
