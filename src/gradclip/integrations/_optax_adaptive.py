"""The transformations of `gradclip.integrations.optax` whose threshold adapts to recent norms."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradclip._src.annotations import AxisName, Ord, Policy, Where
from gradclip._src.backends.jax.operations import either
from gradclip._src.backends.jax.placement import NamedAxes, typed_as
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.functional.clip import clip_by_global_norm as clip_tree
from gradclip._src.functional.clip import clip_by_layer_norm, global_norm
from gradclip._src.passed.leaves import choice_of, counted, names_in
from gradclip._src.public import public_in
from gradclip._src.thresholds.below_usual import rule_given
from gradclip._src.thresholds.following import FollowingRule
from gradclip._src.thresholds.history import AnyHistory, check_between
from gradclip._src.tree import flatten
from gradclip._src.words import listed, typed, with_advice


@public_in("integrations.optax")
class AdaptiveClipState(NamedTuple):
    """The state of `adaptive_clip_by_global_norm`.

    Attributes:
        history: the recent norms, which determine the next threshold.
        norm: the norm before clipping at the last step.
        max_norm: the threshold at the last step.
        num_clipped: the number of steps clipped so far.
        num_skipped: the number of steps skipped so far.
    """

    history: AnyHistory
    norm: jax.Array
    max_norm: jax.Array
    num_clipped: jax.Array
    num_skipped: jax.Array


@public_in("integrations.optax")
class LayerClipState(NamedTuple):
    """The state of `adaptive_clip_by_layer_norm`. Arrays have an entry for each leaf of the updates, in their order.

    Attributes:
        history: the recent norms of each leaf, of shape (leaves, window), and their number, of shape (leaves,).
        norms: the norms before clipping at the last step.
        max_norms: the thresholds at the last step.
        num_clipped: the number of steps that clipped the leaf so far.
    """

    history: AnyHistory
    norms: jax.Array
    max_norms: jax.Array
    num_clipped: jax.Array


@public_in("integrations.optax")
class SkipSpikesState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
        clip: the norm, the threshold and the counts.
        inner: the optimizer's state.
    """

    clip: AdaptiveClipState
    inner: Any


@public_in("integrations.optax")
@with_advice
def adaptive_clip_by_global_norm(
    rule: FollowingRule | None = None,
    *,
    ord: Ord = None,
    nonfinite: Policy = "propagate",
    skip_above: float | None = None,
    axis_name: AxisName = None,
    where: Where = None,
) -> optax.GradientTransformation:
    """Return a transformation that clips the global norm of the updates to a threshold that adapts to recent norms.

    Args:
        rule: how the threshold is computed. None means `gradclip.SpreadRule()`, or with `skip_above`
            `gradclip.QuantileRule()`; both document their formula.
        ord: the order of the norm, as in `gradclip.global_norm`; None means 2. With `optax.inject_hyperparams`, a
            number needs `static_args="ord"`.
        nonfinite: what to do with NaN and infinities, as in `gradclip.clip_by_global_norm`. They never change the
            threshold.
        skip_above: if the norm is more than `skip_above` times the threshold, the updates become zeros. At least 1;
            None and `inf` never skip. The optimizer still takes a step, with zeros. To skip its step, use
            `skip_spikes`.
        axis_name: the mesh axes over which the updates are sharded, as in `gradclip.global_norm`. The state is then the
            same on all devices.
        where: which updates count, as in `gradclip.global_norm`. The others stay as they are.

    The state is an `AdaptiveClipState`: the norm before clipping and the threshold of the last step, and the numbers of
    steps clipped and skipped. Errors are those of `gradclip.clip_by_global_norm`.

    >>> transform = adaptive_clip_by_global_norm()
    >>> state = transform.init({"w": jnp.zeros(2)})
    >>> for gradient in ([3.0, 4.0], [30.0, 40.0]):
    ...     updates, state = transform.update({"w": jnp.array(gradient)}, state)
    >>> [round(float(x), 4) for x in updates["w"]]
    [3.0, 4.0]
    >>> float(state.norm), float(state.max_norm), int(state.num_clipped)
    (50.0, 5.0, 1)
    """
    order, most = Order.parse(setting_known("ord", ord)), math.inf if skip_above is None else _factor(skip_above)
    # optax.inject_hyperparams passes an array, first known, then traced: the rule must not depend on its value.
    rule = rule_given(rule, skips=isinstance(skip_above, jax.Array) or most < math.inf)
    policy = Nonfinite.named(nonfinite)
    chosen: dict[str, Any] = {"ord": order.p, "axis_name": axis_name, "where": where}

    def update(
        updates: optax.Updates, state: AdaptiveClipState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdaptiveClipState]:
        updates = jax.tree.map(jnp.asarray, updates)
        threshold = rule.max_norm(state.history)
        clipped, norm = clip_tree(updates, threshold, nonfinite=nonfinite, **chosen)
        spike, finite = jnp.zeros(jnp.shape(norm), bool), _finite(updates, norm, policy, axis_name, where)
        if not isinstance(most, float) or most < math.inf:
            spike = _spikes(norm, threshold, most) & finite
            if where is None:
                clipped = jax.tree.map(partial(_zeros_where, spike), clipped)
            else:
                clipped = clip_tree(clipped, jnp.where(spike, 0, math.inf), **chosen)[0]
        skipped = spike | (~finite & policy.blanks)
        return clipped, _observed(rule, state, norm, threshold, skipped, finite & ~skipped)

    return optax.GradientTransformation(lambda params: _nothing_observed(rule, params), update)


@public_in("integrations.optax")
@with_advice
def adaptive_clip_by_layer_norm(
    rule: FollowingRule | None = None,
    *,
    ord: Ord = None,
    nonfinite: Policy = "propagate",
    axis_name: AxisName = None,
    where: Where = None,
) -> optax.GradientTransformation:
    """Return a transformation that clips each leaf of the updates to a threshold that adapts to its own recent norms.

    Args:
        rule: how the threshold of a leaf follows from its norms before this step. None means `gradclip.SpreadRule()`.
        ord: the order of the norms, as in `adaptive_clip_by_global_norm`.
        nonfinite: what to do with NaN and infinities, as in `gradclip.clip_by_layer_norm`. They, and zeros, never
            change a threshold.
        axis_name: the mesh axes over which the updates are sharded, as in `gradclip.global_norm`. The state is then the
            same on all devices.
        where: which updates count, as in `gradclip.global_norm`. The others stay as they are, and observe nothing.

    The state is a `LayerClipState`. Errors are those of `gradclip.clip_by_layer_norm`, and a ValueError for updates
    with other leaves than the parameters that `init` got, by their number or their names.

    >>> transform = adaptive_clip_by_layer_norm()
    >>> state = transform.init({"b": jnp.zeros(1), "w": jnp.zeros(2)})
    >>> for size in (1.0, 10.0):
    ...     updates = {"b": jnp.array([size]), "w": jnp.array([3.0, 4.0])}
    ...     updates, state = transform.update(updates, state)
    >>> updates["b"].round(4).tolist(), state.norms.tolist()
    ([1.0], [10.0, 5.0])
    >>> state.num_clipped.tolist()
    [1, 0]
    """
    rule, known = rule_given(rule, skips=False), Order.parse(setting_known("ord", ord)).p
    chosen: dict[str, Any] = {"ord": known, "nonfinite": nonfinite, "axis_name": axis_name, "where": where}

    inits: set[tuple[str, ...]] = set()  # the names of the leaves that `init` got: a state holds no names

    def init(params: optax.Params) -> LayerClipState:
        flat = flatten(params)
        inits.add(names_in(flat))
        return LayerClipState(*_nothing_observed(rule, params, (len(flat.leaves),))[:4])

    def update(
        updates: optax.Updates, state: LayerClipState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, LayerClipState]:
        updates = jax.tree.map(jnp.asarray, updates)
        flat, limits = flatten(updates), rule.max_norm(state.history)
        count, names = len(state.norms), names_in(flat)
        if len(names) != count or (inits and names not in inits):
            others = next((listed(one) for one in inits if len(one) == len(names) == count), f"{count} leaves")
            raise ValueError(
                f"the updates have {len(names)} leaves, {listed(names) or 'none'}, but the state has histories of "
                f"{others}. Call init with parameters of the same structure."
            )
        if not flat.leaves:
            return updates, state
        clipped, tree = clip_by_layer_norm(updates, flat.arrange(list(limits)), **chosen)
        norms = jnp.stack([norm.astype(state.norms.dtype) for norm in flatten(tree).leaves])
        more = ((norms > limits) & jnp.isfinite(norms)).astype(jnp.int32)
        return clipped, LayerClipState(rule.observe(state.history, norms), norms, limits, state.num_clipped + more)

    return optax.GradientTransformation(init, update)


@public_in("integrations.optax")
@with_advice
def skip_spikes(
    tx: optax.GradientTransformation,
    rule: FollowingRule | None = None,
    *,
    ord: Ord = None,
    skip_above: float = 4.0,
    axis_name: AxisName = None,
    where: Where = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer: skip the steps with norm spikes, and clip the others to an adaptive threshold.

    Args:
        tx: the optimizer. When a step is skipped, its state does not change (moments and counts included), and the
            updates are zeros.
        rule: how the threshold is computed. None means `gradclip.QuantileRule()`, which documents the formula.
        ord: the order of the norm, as in `adaptive_clip_by_global_norm`.
        skip_above: skip a step if the norm is NaN, infinite, or more than `skip_above` times the threshold. At least 1.
            With 1 nothing is clipped: steps are skipped instead. The finite norms of skipped steps enter the history,
            so a lasting new level is accepted after `rule.recovery_steps`.
        axis_name: the mesh axes over which the updates are sharded, as in `gradclip.global_norm`. All devices then skip
            the same steps.
        where: which updates count, as in `gradclip.global_norm`. The others reach the optimizer as they are, except at
            skipped steps.

    The state is a `SkipSpikesState`.

    >>> optimizer = skip_spikes(optax.sgd(1.0))
    >>> state = optimizer.init(jnp.zeros(2))
    >>> for gradient in ([3.0, 4.0], [300.0, 400.0]):
    ...     updates, state = optimizer.update(jnp.array(gradient), state)
    >>> updates.tolist(), int(state.clip.num_skipped)
    ([0.0, 0.0], 1)
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"tx must be an optimizer of optax, got {typed(tx)}. Pass it first, such as "
            "skip_spikes(optax.adam(1e-3), skip_above=4.0)."
        )
    rule, inner = rule_given(rule, skips=True), optax.with_extra_args_support(tx)
    order, most = Order.parse(setting_known("ord", ord)), _factor(skip_above)

    def init(params: optax.Params) -> SkipSpikesState:
        return SkipSpikesState(_nothing_observed(rule, params), inner.init(params))

    def update(
        updates: optax.Updates, state: SkipSpikesState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, SkipSpikesState]:
        updates = jax.tree.map(jnp.asarray, updates)
        threshold = rule.max_norm(state.clip.history)
        norm = global_norm(updates, order, axis_name=axis_name, where=where)
        skipped = _spikes(norm, threshold, most) | ~jnp.isfinite(norm)  # also NaN

        def step() -> tuple[optax.Updates, optax.OptState]:
            clipped = clip_tree(updates, threshold, ord=order.p, axis_name=axis_name, where=where)[0]
            return inner.update(clipped, state.inner, params, **extra)

        def nothing() -> tuple[optax.Updates, optax.OptState]:
            made, left = jax.eval_shape(step)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
            # Both branches must return the same types.
            return jax.tree.map(typed_as, zeros, made), jax.tree.map(typed_as, state.inner, left)

        made, left = either(skipped, nothing, step)
        return made, SkipSpikesState(_observed(rule, state.clip, norm, threshold, skipped, ~skipped), left)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros_where(spike: jax.Array, x: jax.Array) -> jax.Array:
    # Integers are the indices of sparse leaves: keep them.
    return jnp.where(spike, 0, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _nothing_observed(rule: FollowingRule, params: optax.Params, shape: tuple[int, ...] = ()) -> AdaptiveClipState:
    wide = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in jax.tree.leaves(params))
    number = jnp.zeros(shape, jnp.float64 if wide else jnp.float32)
    history = rule.init(number, shape)
    # Do not share buffers between fields, so that the state can be donated.
    clipped, skipped = (jnp.zeros(shape, jnp.int32) for _ in range(2))
    return AdaptiveClipState(history, number, rule.max_norm(history), clipped, skipped)


def _factor(skip_above: Any) -> float | jax.Array:
    """Return a checked `skip_above`. A traced number below 1 counts as 1."""
    if isinstance(skip_above, jax.core.Tracer):
        return jnp.maximum(skip_above, 1)
    return check_between("skip_above", setting_known("skip_above", skip_above), 1.0, math.inf)


def _spikes(norm: jax.Array, threshold: jax.Array, skip_above: float | jax.Array) -> jax.Array:
    return norm > threshold * jnp.asarray(skip_above, threshold.dtype)


def _finite(updates: optax.Updates, norm: jax.Array, policy: Nonfinite, axis_name: AxisName, where: Where) -> jax.Array:
    """Say whether the updates that count are finite. Their norm may be infinite: too large for the dtype of norms."""
    if policy.zeroes:
        return ~jnp.isnan(norm)
    counts = updates if where is None else counted(updates, choice_of(where, "keep")).leaves
    leaves = [x for x in jax.tree.leaves(counts) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def all_finite() -> jax.Array:
        strange = [jnp.int32(0), *((~jnp.isfinite(x)).any().astype(jnp.int32) for x in leaves)]
        return NamedAxes.named(() if axis_name is None else axis_name).largest(strange) == 0

    return either(jnp.isinf(norm), all_finite, lambda: jnp.isfinite(norm))


def _observed(
    rule: FollowingRule,
    state: AdaptiveClipState,
    norm: jax.Array,
    threshold: jax.Array,
    skipped: jax.Array,
    counts: jax.Array,
) -> AdaptiveClipState:
    clipped = (norm > threshold) & counts
    return AdaptiveClipState(
        rule.observe(state.history, norm),
        norm.astype(state.norm.dtype),
        threshold,
        state.num_clipped + clipped.astype(jnp.int32),
        state.num_skipped + skipped.astype(jnp.int32),
    )


def setting_known(name: str, value: Any) -> Any:
    """Return a setting that decides what is traced. `optax.inject_hyperparams` makes numbers arrays."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be known while JAX traces, got a traced array. With optax.inject_hyperparams, pass "
            f"static_args={name!r}."
        )
    return value.item() if isinstance(value, jax.Array) else value
