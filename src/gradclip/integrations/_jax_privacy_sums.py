"""The functions of `gradclip.integrations.jax_privacy` that sum clipped values over a batch, also by its plans."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradclip._src.annotations import Method, Policy, Thresholds, WideDtype
from gradclip._src.backends.entries import Entry
from gradclip._src.backends.registry import named
from gradclip._src.passed.arguments import check_flag, check_threshold, is_single_threshold
from gradclip._src.passed.leaves import as_floats
from gradclip._src.private.batching.verbs import Batching
from gradclip._src.private.functions import transforms
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.functions.settings import made_of
from gradclip._src.private.sums.call_arguments import positions
from gradclip._src.private.sums.settings import check_name
from gradclip._src.public import public_in
from gradclip._src.tree import flatten
from gradclip._src.words import shown, with_advice
from gradclip.integrations._jax_privacy_values import (
    AuxiliaryOutput,
    BoundedSensitivityCallable,
    bound_of,
    cast,
    check_grid_scale,
    divided,
    left_out_together,
    norms_of,
    skips_whole_examples,
    widened,
)

_METHODS = ("materialize", "auto", "ghost")


@public_in("integrations.jax_privacy")
@dataclass(frozen=True, eq=False, repr=False)
class JaxPrivacyFunction(ClippedFunction):
    """A `ClippedFunction` with jax-privacy's conventions: always JAX, and keyword arguments also carry the batch.

    `dtype` is that of the result; None keeps the dtypes of the clipped values. `spmd_axis_name` is as in `jax.vmap`.
    """

    dtype: jax.typing.DTypeLike | None = None
    spmd_axis_name: str | None = None

    def _framework(self, args: Sequence[Any]) -> Entry:
        return named("jax")

    def _is_mapped(self, position: int, count: int) -> bool:
        return position == count - 1 or super()._is_mapped(position, count)

    def _over_batch(
        self, verbs: Batching, of_example: Callable[..., Any], axes: Sequence[int | None]
    ) -> Callable[..., Any]:
        return verbs.over_batch(of_example, axes, self.spmd_axis_name)

    def _finished(self, summed: object, dtypes: Sequence[Any]) -> Any:
        flat = flatten(super()._finished(summed, dtypes))
        if self._settings.grid is not None:
            return flat.rebuild(flat.leaves)
        wanted = dtypes if self.dtype is None else [self.dtype] * len(flat.leaves)
        return flat.rebuild([cast(x, dtype) for x, dtype in zip(flat.leaves, wanted, strict=True)])

    def _to_clip(self, tree: object) -> Any:
        return as_floats(tree)

    def _added_in(self) -> Any:
        if self._settings.grid is not None:
            return None
        return self._observed.narrowest() if self.dtype is None else self.dtype


@public_in("integrations.jax_privacy")
def unchanged(gradient: Any) -> Any:
    """Return the gradient: the transformation that is none."""
    return gradient


def is_planned(method: Method, needs_gradients: Mapping[str, bool]) -> bool:
    """Say whether gradients are measured by a plan. `needs_gradients` says for each reason why not whether it holds.

    Raises ValueError for an unknown method, and for "ghost" if a reason holds.
    """
    check_name("method", method, _METHODS)
    why = next((reason for reason, holds in needs_gradients.items() if holds), "")
    if method == "ghost" and why:
        raise ValueError(f"method='ghost' makes no large gradients of examples, but {why}. Pass method='auto'.")
    return method != "materialize" and not why


def translated(asked: Mapping[str, Any], **changed: Any) -> JaxPrivacyFunction:
    """Return the function that jax-privacy's arguments ask for. `changed` are settings of `gradclip.clipped_grad`."""
    to_unit = check_flag("rescale_to_unit_norm", asked["rescale_to_unit_norm"])
    batch = positions("batch_argnums", asked["batch_argnums"])  # here None is no default
    named = {"max_norm": asked["l2_clip_norm"], "to_unit": to_unit, "batch_argnums": batch}
    return made_of(JaxPrivacyFunction, {**asked, **named, **changed})


def planned(asked: Mapping[str, Any], argnums: int | tuple[int, ...]) -> BoundedSensitivityCallable:
    """Return gradclip's own function for the arguments of jax-privacy's `clipped_grad`, with its results."""
    nan_safe, return_norms = asked["nan_safe"], asked["return_grad_norms"]
    clipped = translated(
        asked,
        argnums=argnums,
        nonfinite="drop" if nan_safe else "propagate",
        pre_clipping_transform=None,
        return_norms=return_norms,
        sum_dtype=_sums_in(asked["dtype"]),
    )

    def call(*args: object, is_padding_example: jax.typing.ArrayLike | None = None, **kwargs: object) -> Any:
        mask = None if is_padding_example is None else ~jnp.asarray(is_padding_example, bool)
        result = clipped(*args, mask=mask, **kwargs)
        return (result[0], AuxiliaryOutput(*result[1])) if wants_outputs else result

    wants_outputs = clipped.has_aux or clipped.return_values or return_norms
    largest = bound_of(clipped.max_norm, to_unit=clipped._settings.to_unit)
    bound = divided(largest, clipped.normalize_by) if nan_safe else math.inf
    return BoundedSensitivityCallable(call, bound, wants_outputs, clipped)


def _sums_in(dtype: jax.typing.DTypeLike | None) -> WideDtype | None:
    """Return the dtype of sums whose result has a dtype; None if it follows from the gradients."""
    wide = dtype is not None and jnp.dtype(dtype) == jnp.float64 and jax.config.jax_enable_x64
    return "float64" if wide else None


@public_in("integrations.jax_privacy")
@with_advice
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
    asked = dict(locals())
    rescale_to_unit_norm = check_flag("rescale_to_unit_norm", rescale_to_unit_norm)
    nan_safe = check_flag("nan_safe", nan_safe)
    has_aux, return_norms = check_flag("has_aux", has_aux), check_flag("return_norms", return_norms)
    _check_thresholds(l2_clip_norm)
    if grid_scale is not None:
        check_grid_scale(grid_scale, l2_clip_norm, rescale_to_unit_norm, normalize_by, nan_safe)
        dtype = None
    policy: Policy = ("drop" if skips_whole_examples() else "zero") if nan_safe else "propagate"
    together = policy == "drop" and not is_single_threshold(l2_clip_norm)
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
    made = BoundedSensitivityCallable(call, bound if nan_safe else math.inf, has_aux or return_norms, clipped)
    return made.made_by(clipped_fun, asked)


def _check_thresholds(l2_clip_norm: Thresholds) -> None:
    """Raise for a threshold that is none, before `max_norm` is the name of them all."""
    thresholds = [l2_clip_norm] if is_single_threshold(l2_clip_norm) else flatten(l2_clip_norm).leaves
    if not thresholds:
        raise ValueError(f"l2_clip_norm holds no thresholds, got {shown(l2_clip_norm)}. Pass a number.")
    for threshold in thresholds:
        check_threshold(threshold, "l2_clip_norm")


@public_in("integrations.jax_privacy")
@with_advice
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
    asked = dict(locals())
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
        return planned(asked, argnums).made_by(clipped_grad, asked)
    wants_outputs = has_aux or return_values or return_grad_norms

    def gradient(*args: object, **kwargs: object) -> Any:
        made, grads = jax.value_and_grad(fun, argnums, has_aux=has_aux)(*args, **kwargs)
        value, aux = made if has_aux else (made, None)
        norm = norms_of(grads, l2_clip_norm) if return_grad_norms else None
        outputs = AuxiliaryOutput(value if return_values else None, norm, aux)
        result = pre_clipping_transform(grads)
        return (result, outputs) if wants_outputs else result

    same = {name: asked[name] for name in inspect.signature(clipped_fun).parameters if name in asked}
    return clipped_fun(**same | {"fun": gradient, "has_aux": wants_outputs}).made_by(clipped_grad, asked)


_OF_CONFIG = ("l2_clip_norm", "rescale_to_unit_norm", "normalize_by")
_OF_FLAGS = ("dtype", "microbatch_size", "spmd_axis_name", "keep_batch_dim")


@public_in("integrations.jax_privacy")
@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """A config of jax-privacy whose plans clip and sum with gradclip. `with_gradclip` makes it from `config`."""

    config: Any

    @property
    def plan(self) -> Any:
        """The plan, as a config of jax-privacy 2.0 has it."""
        return self._with_ours(self.config.plan, self.config)

    def make(self, performance_flags: object = None) -> Any:
        """Return the plan for these flags, as a config of jax-privacy has it since 2.3."""
        return self._with_ours(self.config.make(performance_flags), performance_flags)

    def _with_ours(self, plan: Any, flags: object) -> Any:
        settings = {name: getattr(self.config, name) for name in _OF_CONFIG}
        settings |= {"dtype": jnp.float32} if flags is None else _found(flags)
        return dataclasses.replace(plan, clipped_grad=partial(clipped_grad, **settings))


@public_in("integrations.jax_privacy")
def with_gradclip(config: object) -> PlanConfig:
    """Return a config of jax-privacy whose plans clip and sum with gradclip, for `DPTrainer` or a loop of your own.

    The plan keeps its batch selection, its noise and its privacy accounting. Only `clipped_grad` is gradclip's, with
    the threshold and the other settings of `config`.

    Args:
        config: a `BandMFConfig`, or a `BandMFExecutionPlanConfig` of jax-privacy 2.0, calibrated: calibrate it first.

    Returns:
        An object with `plan` (jax-privacy 2.0) and `make(performance_flags)` (since 2.3).

    Raises:
        TypeError: `config` is none that says how to clip.

    `DPTrainer(config=with_gradclip(config), loss_fn=loss_fn, optimizer=optimizer)` trains with it.
    """
    lacking = [name for name in _OF_CONFIG if not hasattr(config, name)]
    if lacking or isinstance(config, type):
        raise TypeError(
            f"config must be a config of jax-privacy with {', '.join(_OF_CONFIG)}, such as a BandMFConfig, got a "
            f"{type(config).__name__}{f' without {lacking[0]}' if lacking else ''}."
        )
    return PlanConfig(config)


def _found(flags: object) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in _OF_FLAGS if hasattr(flags, name)}
