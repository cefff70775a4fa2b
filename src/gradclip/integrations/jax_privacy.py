"""The names `clip_pytree`, `clipped_fun` and `clipped_grad` of `jax_privacy.clipping`, on gradclip's engine.

Switch by writing `from gradclip.integrations.jax_privacy import clipped_grad`. What differs: the promised bound holds
in floating point too, for every dtype, and with `nan_safe=False` a NaN or an infinity makes all of its norm's
gradients NaN. As in newer releases of the library, `clip_norm` may be a tree of thresholds. Examples are summed in
float32 at least, and a batch need not be a multiple of `microbatch_size`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradclip.arguments import check_flag, check_threshold, is_array, is_single_threshold
from gradclip.backends.batching import Batching
from gradclip.backends.entries import Entry
from gradclip.backends.registry import named
from gradclip.clip import global_norm
from gradclip.core.decide import Clipping
from gradclip.core.nonfinite import PROPAGATE, ZERO
from gradclip.core.norms import Order
from gradclip.core.rules import CLIP, Target
from gradclip.integrations import needed_for
from gradclip.layers.groups import clip_groups
from gradclip.per_example import transforms
from gradclip.per_example.call_arguments import positions
from gradclip.per_example.function import ClippedFunction
from gradclip.per_example.settings import PerExampleSettings
from gradclip.tree import flatten
from gradclip.typing import Thresholds, Tree

with needed_for("jax_privacy"):
    import jax
    import jax.numpy as jnp

__all__ = ["AuxiliaryOutput", "BoundedSensitivityCallable", "clip_pytree", "clipped_fun", "clipped_grad"]

_TIMES_BOUND = {"ADD_OR_REMOVE_ONE": 1, "REPLACE_ONE": 2, "REPLACE_SPECIAL": 1}


class AuxiliaryOutput(NamedTuple):
    """What was asked for of each example, with the batch on axis 0; None for what was not."""

    values: Any = None
    grad_norms: Any = None
    aux: Any = None


@dataclass(frozen=True, eq=False)
class BoundedSensitivityCallable:
    """A function whose result one example can move by `l2_norm_bound` at most; with `has_aux`, its first result.

    `clipped` is the engine's function: `clipped.sensitivity()` tells of the rounding of sums, too.
    """

    fun: Callable[..., Any]
    l2_norm_bound: Any
    has_aux: bool
    clipped: ClippedFunction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fun(*args, **kwargs)

    def sensitivity(self, neighboring_relation: object = None) -> Any:
        """Return the L2 sensitivity under one of `dp_accounting.NeighboringRelation`, REPLACE_SPECIAL for None.

        It speaks of batches of one shape, padded and masked by `is_padding_example`.
        """
        name = getattr(neighboring_relation, "name", "REPLACE_SPECIAL" if neighboring_relation is None else "")
        if name not in _TIMES_BOUND:
            raise ValueError(
                f"neighboring_relation must be one of {', '.join(_TIMES_BOUND)} of dp_accounting.NeighboringRelation, "
                f"got {neighboring_relation!r}."
            )
        return _TIMES_BOUND[name] * self.l2_norm_bound


@dataclass(frozen=True, eq=False)
class _ClippedFunction(ClippedFunction):
    """A clipped function as that of jax-privacy: always JAX's, and keyword arguments carry the batch, too.

    `dtype`: of the result, None for the dtypes of what is clipped. `spmd_axis_name`: as in `jax.vmap`.
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

    def _finished(self, verbs: Batching, summed: object, dtypes: Sequence[Any]) -> Any:
        flat = flatten(super()._finished(verbs, summed, dtypes))
        wanted = dtypes if self.dtype is None else [self.dtype] * len(flat.leaves)
        return flat.rebuild([verbs.cast(x, dtype) for x, dtype in zip(flat.leaves, wanted, strict=True)])

    def _added_in(self) -> Any:
        return self.seen.narrowest() if self.dtype is None else self.dtype


def clip_pytree(
    pytree: Tree,
    clip_norm: Thresholds,
    rescale_to_unit_norm: bool = False,
    nan_safe: bool = True,
    return_zero: bool | jax.Array = False,
) -> tuple[Tree, Any]:
    """Clip `pytree` by its L2 norm to `clip_norm`; return it and its norm before.

    | clip_norm     | rescale_to_unit_norm=False | rescale_to_unit_norm=True |
    |---------------|----------------------------|---------------------------|
    | 0             | zeros                      | input / norm              |
    | inf           | unchanged                  | zeros                     |
    | < 0, a number | ValueError                 | ValueError                |
    | < 0, traced   | zeros                      | zeros                     |

    A tree of zeros comes back unchanged.

    Args:
        pytree: a tree of JAX arrays.
        clip_norm: the threshold; or a prefix of `pytree` that holds thresholds, each for what lies below it.
        rescale_to_unit_norm: also divide by `clip_norm`, so that the norm is at most 1.
        nan_safe: NaN and infinities count as 0. Otherwise they make everything that shares their norm NaN.
        return_zero: return zeros, whatever the input; it may be traced.

    Returns:
        `(clipped, norm)`, with the input's structure and dtypes; the norm in float32, or a tree of norms shaped as
        `clip_norm`.

    The signature is that of jax-privacy 2.0.

    >>> clipped, norm = clip_pytree({"w": jnp.array([6.0, 8.0])}, clip_norm=20.0, rescale_to_unit_norm=True)
    >>> print([round(float(x), 4) for x in clipped["w"]], norm)
    [0.3, 0.4] 10.0
    """
    rescale_to_unit_norm = check_flag("rescale_to_unit_norm", rescale_to_unit_norm)
    nan_safe = check_flag("nan_safe", nan_safe)
    if not (is_array(return_zero) and return_zero.shape == ()):
        return_zero = check_flag("return_zero", return_zero)
    flat = flatten(jax.tree.map(jnp.asarray, pytree))
    single = is_single_threshold(clip_norm)
    prefix, groups = (None, [range(len(flat.leaves))]) if single else flat.split_by(clip_norm)
    thresholds = [check_threshold(c, "clip_norm") for c in ([clip_norm] if prefix is None else prefix.leaves)]
    policy = ZERO if nan_safe else PROPAGATE
    clipping = Clipping(None, Order(2.0), policy, Target(1.0) if rescale_to_unit_norm else CLIP)
    leaves, norms = clip_groups(flat, groups, thresholds, clipping)
    norms = [jnp.asarray(norm, jnp.float32) for norm in norms]
    kept = [jnp.where(return_zero, jnp.zeros_like(leaf), leaf) for leaf in leaves]
    clipped = kept if return_zero is not False else leaves
    return flat.rebuild(clipped), norms[0] if prefix is None else prefix.arrange(norms)


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 0,
    keep_batch_dim: bool = True,
    l2_clip_norm: float = 1.0,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: jax.typing.DTypeLike | None = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
) -> BoundedSensitivityCallable:
    """Return a function that clips the results of `fun` for each example and sums them.

    Args:
        fun: as in `gradclip.clipped_fun`.
        has_aux: as there.
        batch_argnums: as there.
        keep_batch_dim: as there.
        l2_clip_norm: the threshold of each example.
        rescale_to_unit_norm: also divide by `l2_clip_norm`, as in `clip_pytree`.
        normalize_by: what the sum is divided by.
        return_norms: also return the norm of each example before clipping.
        microbatch_size: as in `gradclip.clipped_fun`.
        nan_safe: NaN and infinities count as 0. Otherwise they make the sum NaN.
        dtype: of the result; None for the dtypes that `fun` returns.
        prng_argnum: as in `gradclip.clipped_fun`.
        spmd_axis_name: as in `jax.vmap`.

    Returns:
        A function of the arguments of `fun`, and of `is_padding_example=`: booleans of shape (batch,), True for what
        contributes zero. Other keyword arguments carry the batch on axis 0, too. It returns the sum; or `(sum, aux)`,
        `(sum, norms)` or `(sum, (aux, norms))`, as asked for.

    The signature is that of jax-privacy 2.0.

    >>> print(clipped_fun(jnp.mean, l2_clip_norm=1.0)(jnp.array([0.0, 0.5, -2.0, 3.0])))
    0.5
    """
    rescale_to_unit_norm = check_flag("rescale_to_unit_norm", rescale_to_unit_norm)
    nan_safe = check_flag("nan_safe", nan_safe)
    check_threshold(l2_clip_norm, "l2_clip_norm")
    clipped = _ClippedFunction(
        _widened(fun, dtype, has_aux),
        PerExampleSettings(l2_clip_norm, nonfinite="zero" if nan_safe else "propagate", to_unit=rescale_to_unit_norm),
        None,
        positions("batch_argnums", batch_argnums),
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        return_norms=return_norms,
        microbatch_size=microbatch_size,
        normalize_by=normalize_by,
        prng_argnum=prng_argnum,
        dtype=dtype,
        spmd_axis_name=spmd_axis_name,
    )

    def call(*args: Any, is_padding_example: jax.typing.ArrayLike | None = None, **kwargs: Any) -> Any:
        mask = None if is_padding_example is None else ~jnp.asarray(is_padding_example, bool)
        result = clipped(*args, mask=mask, **kwargs)
        if not (has_aux or return_norms):
            return result
        value, outputs = result
        norms = None if outputs.norms is None else outputs.norms.astype(jnp.float32)
        return value, (outputs.aux, norms) if has_aux and return_norms else outputs.aux if has_aux else norms

    bound = (1.0 if rescale_to_unit_norm else l2_clip_norm) / normalize_by if nan_safe else math.inf
    return BoundedSensitivityCallable(call, bound, has_aux or return_norms, clipped)


def _widened(fun: Callable[..., Any], dtype: jax.typing.DTypeLike | None, has_aux: bool) -> Callable[..., Any]:
    """Return `fun`, its results widened to `dtype`, and left as they are where that is narrower."""
    if dtype is None:
        return fun

    def widened(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        value, *aux = result if has_aux else (result,)
        wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), value)
        return (wide, *aux) if has_aux else wide

    return widened


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: float,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[Any], Any] = lambda x: x,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: jax.typing.DTypeLike | None = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
) -> BoundedSensitivityCallable:
    """Return a function that clips the gradient of `fun` for each example and sums them.

    Args:
        fun: as in `gradclip.clipped_grad`.
        argnums: as there.
        has_aux: as there.
        l2_clip_norm: the threshold of each example.
        rescale_to_unit_norm: as in `clipped_fun`.
        normalize_by: as there.
        batch_argnums: as there.
        keep_batch_dim: as there.
        return_values: also return what `fun` returns for each example.
        return_grad_norms: also return the norm of each example's gradient, as `fun` has it.
        pre_clipping_transform: what is made of the gradient of an example before it is clipped.
        microbatch_size: as in `clipped_fun`.
        nan_safe: as there.
        dtype: as there.
        prng_argnum: as there.
        spmd_axis_name: as there.

    Returns:
        A function as `clipped_fun` returns. Its result is the sum, or a pair of it and an `AuxiliaryOutput`.

    The signature is that of jax-privacy 2.0.

    >>> def loss(mean, x):
    ...     return 0.5 * jnp.mean((x - mean) ** 2)
    >>> print(clipped_grad(loss, l2_clip_norm=4.5)(3.0, jnp.array([0.0, 7.0, -2.0])))
    3.5
    """
    has_aux = check_flag("has_aux", has_aux)
    for name, flag in (("return_values", return_values), ("return_grad_norms", return_grad_norms)):
        check_flag(name, flag)
    transforms.clipped_grad(fun, l2_clip_norm, argnums=argnums, batch_argnums=batch_argnums, prng_argnum=prng_argnum)
    wants_outputs = has_aux or return_values or return_grad_norms
    argnums = argnums if isinstance(argnums, int) else tuple(argnums)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        made, grads = jax.value_and_grad(fun, argnums, has_aux=has_aux)(*args, **kwargs)
        value, aux = made if has_aux else (made, None)
        norm = global_norm(grads) if return_grad_norms else None
        outputs = AuxiliaryOutput(value if return_values else None, norm, aux)
        result = pre_clipping_transform(grads)
        return (result, outputs) if wants_outputs else result

    return clipped_fun(
        gradient,
        wants_outputs,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        l2_clip_norm=l2_clip_norm,
        rescale_to_unit_norm=rescale_to_unit_norm,
        normalize_by=normalize_by,
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
        dtype=dtype,
        prng_argnum=prng_argnum,
        spmd_axis_name=spmd_axis_name,
    )
