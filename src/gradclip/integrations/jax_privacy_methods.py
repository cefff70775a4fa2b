"""The clipped functions of `gradclip.integrations.jax_privacy`, and `clipped_grad` by a plan."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradclip._src.backends.entries import Entry
from gradclip._src.backends.registry import named
from gradclip._src.passed.arguments import check_flag
from gradclip._src.passed.leaves import as_floats
from gradclip._src.private.batching.verbs import Batching
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.functions.settings import made_of
from gradclip._src.private.sums.quantities import check_name
from gradclip._src.tree import flatten
from gradclip.integrations.jax_privacy_results import AuxiliaryOutput, BoundedSensitivityCallable, bound_of, divided
from gradclip.integrations.jax_privacy_values import cast
from gradclip.typing import Method, WideDtype

_METHODS = ("materialize", "auto", "ghost")


@dataclass(frozen=True, eq=False)
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
        if self.settings.grid is not None:
            return flat.rebuild(flat.leaves)
        wanted = dtypes if self.dtype is None else [self.dtype] * len(flat.leaves)
        return flat.rebuild([cast(x, dtype) for x, dtype in zip(flat.leaves, wanted, strict=True)])

    def _to_clip(self, tree: object) -> Any:
        return as_floats(tree)

    def _added_in(self) -> Any:
        if self.settings.grid is not None:
            return None
        return self.observed.narrowest() if self.dtype is None else self.dtype


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
    return made_of(JaxPrivacyFunction, {**asked, "max_norm": asked["l2_clip_norm"], "to_unit": to_unit, **changed})


def planned(asked: Mapping[str, Any], argnums: int | tuple[int, ...]) -> BoundedSensitivityCallable:
    """Return gradclip's own function for the arguments of jax-privacy's `clipped_grad`, with its results."""
    nan_safe, return_norms = asked["nan_safe"], asked["return_grad_norms"]
    clipped = translated(
        asked,
        argnums=argnums,
        nonfinite="skip" if nan_safe else "propagate",
        pre_clipping_transform=None,
        return_norms=return_norms,
        sum_dtype=_sums_in(asked["dtype"]),
    )

    def call(*args: object, is_padding_example: jax.typing.ArrayLike | None = None, **kwargs: object) -> Any:
        mask = None if is_padding_example is None else ~jnp.asarray(is_padding_example, bool)
        result = clipped(*args, mask=mask, **kwargs)
        return (result[0], AuxiliaryOutput(*result[1])) if wants_outputs else result

    wants_outputs = clipped.has_aux or clipped.return_values or return_norms
    largest = bound_of(clipped.max_norm, to_unit=clipped.settings.to_unit)
    bound = divided(largest, clipped.normalize_by) if nan_safe else math.inf
    return BoundedSensitivityCallable(call, bound, wants_outputs, clipped)


def _sums_in(dtype: jax.typing.DTypeLike | None) -> WideDtype | None:
    """Return the dtype of sums whose result has a dtype; None if it follows from the gradients."""
    wide = dtype is not None and jnp.dtype(dtype) == jnp.float64 and jax.config.jax_enable_x64
    return "float64" if wide else None
