"""The functions of `gradclip.integrations.jax_privacy` that sum clipped values over a batch."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradclip._src.passed.arguments import check_flag, check_threshold, is_single_threshold
from gradclip._src.private.functions import transforms
from gradclip._src.tree import flatten
from gradclip._src.words import shown
from gradclip.integrations.jax_privacy_grid import check_grid_scale
from gradclip.integrations.jax_privacy_methods import is_planned, planned, translated, unchanged
from gradclip.integrations.jax_privacy_results import AuxiliaryOutput, BoundedSensitivityCallable, bound_of, divided
from gradclip.integrations.jax_privacy_values import left_out_together, norms_of, skips_whole_examples, widened
from gradclip.typing import Method, Policy, Thresholds


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 0,
    keep_batch_dim: bool = True,
    l2_clip_norm: Thresholds = 1.0,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: jax.typing.DTypeLike | None = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    grid_scale: int | None = None,
) -> BoundedSensitivityCallable:
    """Return a function that clips the result of `fun` for each example and sums the clipped results.

    Args:
        fun: as in `gradclip.clipped_fun`.
        has_aux: as in `gradclip.clipped_fun`.
        batch_argnums: as in `gradclip.clipped_fun`.
        keep_batch_dim: as in `gradclip.clipped_fun`.
        l2_clip_norm: the threshold for each example. Or a tree of thresholds that is a prefix of the result of `fun`,
            as in `clip_pytree`; `None` stands for an empty part.
        rescale_to_unit_norm: also divide by `l2_clip_norm`, as in `clip_pytree`.
        normalize_by: divide the sum by this number.
        return_norms: also return the norm of each example before clipping. For a tree of thresholds, a tree.
        microbatch_size: as in `gradclip.clipped_fun`.
        nan_safe: leave out examples with NaN or infinities. Up to jax-privacy 2.2, if that is installed, treat such
            elements as 0 instead. If False, they turn the sum into NaN.
        dtype: the dtype of the result; None keeps the dtypes that `fun` returns.
        prng_argnum: as in `gradclip.clipped_fun`.
        spmd_axis_name: as in `jax.vmap`.
        grid_scale: sum on a grid of so many integer steps in `l2_clip_norm`, as in `clip_and_round_to_grid`. The sum
            is int64 and `l2_norm_bound` is `grid_scale`. Needs JAX's 64-bit mode; not for a tree of thresholds.

    Returns:
        A function that takes the arguments of `fun`, and `is_padding_example=`: booleans of shape (batch,), True for
        examples that contribute zero. Other keyword arguments also carry the batch on axis 0. It returns the sum, or
        `(sum, aux)`, `(sum, norms)` or `(sum, (aux, norms))`, depending on `has_aux` and `return_norms`.

    The signature is that of jax-privacy 2.3.

    >>> x = jnp.array([0.0, 0.5, -2.0, 3.0])
    >>> print(clipped_fun(jnp.mean, l2_clip_norm=1.0)(x))
    0.5
    """
    asked = locals()
    rescale_to_unit_norm = check_flag("rescale_to_unit_norm", rescale_to_unit_norm)
    nan_safe = check_flag("nan_safe", nan_safe)
    has_aux, return_norms = check_flag("has_aux", has_aux), check_flag("return_norms", return_norms)
    _check_thresholds(l2_clip_norm)
    if grid_scale is not None:
        check_grid_scale(grid_scale, l2_clip_norm, rescale_to_unit_norm, normalize_by, nan_safe)
        dtype = None
    policy: Policy = ("skip" if skips_whole_examples() else "zero") if nan_safe else "propagate"
    together = policy == "skip" and not is_single_threshold(l2_clip_norm)
    made = widened(fun, dtype, has_aux)
    clipped = translated(
        asked,
        fun=left_out_together(made, has_aux, l2_clip_norm) if together else made,
        has_aux=has_aux or together,
        return_norms=return_norms and not together,
        dtype=dtype,
        nonfinite=policy,
        grid=grid_scale,
    )

    def call(*args: object, is_padding_example: jax.typing.ArrayLike | None = None, **kwargs: object) -> Any:
        mask = None if is_padding_example is None else ~jnp.asarray(is_padding_example, bool)
        result = clipped(*args, mask=mask, **kwargs)
        if not (has_aux or return_norms):
            return result[0] if together else result
        value, (_, norms, aux) = result
        aux, norms = aux if together else (aux, norms)
        norms = jax.tree.map(lambda norm: norm.astype(jnp.float32), norms)
        return value, (aux, norms) if has_aux and return_norms else aux if has_aux else norms

    largest = bound_of(l2_clip_norm, to_unit=rescale_to_unit_norm)
    bound = float(grid_scale) if grid_scale else divided(largest, clipped.normalize_by)
    return BoundedSensitivityCallable(call, bound if nan_safe else math.inf, has_aux or return_norms, clipped)


def _check_thresholds(l2_clip_norm: Thresholds) -> None:
    """Raise for a threshold that is none, before `max_norm` is the name of them all."""
    thresholds = [l2_clip_norm] if is_single_threshold(l2_clip_norm) else flatten(l2_clip_norm).leaves
    if not thresholds:
        raise ValueError(f"l2_clip_norm holds no thresholds, got {shown(l2_clip_norm)}. Pass a number.")
    for threshold in thresholds:
        check_threshold(threshold, "l2_clip_norm")


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Thresholds,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] = unchanged,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: jax.typing.DTypeLike | None = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    grid_scale: int | None = None,
    method: Method = "materialize",
) -> BoundedSensitivityCallable:
    """Return a function that clips the gradient of `fun` for each example and sums the clipped gradients.

    Args:
        fun: as in `gradclip.clipped_grad`.
        argnums: as in `gradclip.clipped_grad`.
        has_aux: as in `gradclip.clipped_grad`.
        l2_clip_norm: as in `clipped_fun`.
        rescale_to_unit_norm: as in `clipped_fun`.
        normalize_by: as in `clipped_fun`.
        batch_argnums: as in `clipped_fun`.
        keep_batch_dim: as in `clipped_fun`.
        return_values: also return the value of `fun` for each example.
        return_grad_norms: also return the norm of each example's gradient, before `pre_clipping_transform`.
        pre_clipping_transform: a function applied to each example's gradient before clipping.
        microbatch_size: as in `clipped_fun`.
        nan_safe: as in `clipped_fun`.
        dtype: as in `clipped_fun`.
        prng_argnum: as in `clipped_fun`.
        spmd_axis_name: as in `clipped_fun`.
        grid_scale: as in `clipped_fun`.
        method: "materialize", as jax-privacy does, makes the gradient of each example. "auto" and "ghost" are as in
            `gradclip.clipped_grad`. Four settings need the gradients: `pre_clipping_transform`, `grid_scale`,
            `spmd_axis_name`, and a tree of thresholds with `nan_safe`. Then "auto" is "materialize", and "ghost" a
            ValueError. Otherwise `nan_safe` leaves out whole examples, for every jax-privacy.

    Returns:
        A function like the one `clipped_fun` returns. It returns the sum, or `(sum, AuxiliaryOutput)` if you ask for
        auxiliary results, values or norms.

    The signature is that of jax-privacy 2.3, and `method`. `clipped.plan(*args)` of the result returns the plan.

    >>> def loss(mean, x):
    ...     return 0.5 * jnp.mean((x - mean) ** 2)
    >>> x = jnp.array([0.0, 7.0, -2.0])
    >>> print(clipped_grad(loss, l2_clip_norm=4.5)(3.0, x))
    3.5
    """
    asked = locals()
    has_aux, nan_safe = check_flag("has_aux", has_aux), check_flag("nan_safe", nan_safe)
    for name, flag in (("return_values", return_values), ("return_grad_norms", return_grad_norms)):
        check_flag(name, flag)
    _check_thresholds(l2_clip_norm)
    transforms.clipped_grad(fun, l2_clip_norm, argnums=argnums, batch_argnums=batch_argnums, prng_argnum=prng_argnum)
    argnums = argnums if isinstance(argnums, int) else tuple(argnums)
    needs_gradients = {
        "pre_clipping_transform= changes them": pre_clipping_transform is not unchanged,
        "grid_scale= rounds them": grid_scale is not None,
        "spmd_axis_name= is for jax.vmap over them": spmd_axis_name is not None,
        "nan_safe=True with a tree of thresholds searches all of them for NaN": nan_safe
        and not is_single_threshold(l2_clip_norm),
    }
    if is_planned(method, needs_gradients):
        return planned(asked, argnums)
    wants_outputs = has_aux or return_values or return_grad_norms

    def gradient(*args: object, **kwargs: object) -> Any:
        made, grads = jax.value_and_grad(fun, argnums, has_aux=has_aux)(*args, **kwargs)
        value, aux = made if has_aux else (made, None)
        norm = norms_of(grads, l2_clip_norm) if return_grad_norms else None
        outputs = AuxiliaryOutput(value if return_values else None, norm, aux)
        result = pre_clipping_transform(grads)
        return (result, outputs) if wants_outputs else result

    same = {name: asked[name] for name in inspect.signature(clipped_fun).parameters if name in asked}
    return clipped_fun(**same | {"fun": gradient, "has_aux": wants_outputs})
