"""A `ClippedFunction` with the conventions of `jax_privacy.clipping`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gradclip.backends.entries import Entry
from gradclip.backends.registry import named
from gradclip.integrations.jax_privacy_values import cast
from gradclip.leaves import as_floats
from gradclip.per_example.batching.verbs import Batching
from gradclip.per_example.function import ClippedFunction
from gradclip.tree import flatten


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
