"""Clip each example of a batch by its own norm and add up, from gradients in factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradclip._src.backends.registry import find
from gradclip._src.core.formats import FLOAT64, bare_name, format_named
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.per_example.clip import Grouping
from gradclip._src.per_example.ghost.measure import arrays_of
from gradclip._src.per_example.ghost.products import Products
from gradclip._src.per_example.ghost.records import Gradient
from gradclip._src.per_example.ghost.sums import ExampleClipping, clipped_sums
from gradclip._src.per_example.prepared import Outline
from gradclip._src.per_example.settings import PerExampleSettings
from gradclip._src.per_example.sums import nothing, shared_threshold
from gradclip._src.tree import FlatTree


@with_subnormals
def clip_factors(
    products: type[Products],
    parameters: FlatTree,
    gradients: Sequence[Gradient],
    settings: PerExampleSettings,
    mask: object,
) -> tuple[Any, Any]:
    """Clip and add up as `gradclip.per_example_clip`. Return the sums, and the norms of the examples."""
    grouping = Grouping.of(parameters.outline([Outline((1, *x.shape), x.dtype) for x in parameters.leaves]), settings)
    arrays = [x for gradient in gradients for x in arrays_of(gradient)]
    backend = find(arrays, lambda: ["a factor of a gradient"] * len(arrays), *grouping.thresholds, mask)
    backend.check_sum_dtype(settings.dtype_of_sums)
    inside = None if mask is None else backend.booleans(mask)
    sums: dict[int, Any] = {}
    norms = []
    by = products(concrete=backend.concrete)
    with backend.precision(), by.precision():
        for indices, threshold, share in zip(grouping.groups, grouping.thresholds, grouping.shares, strict=True):
            if not indices:
                norms.append(nothing(backend, arrays[0].shape[:1], arrays).norm)
                continue
            limit = shared_threshold(backend, check_threshold(threshold, backend=backend), share)
            leaves = [parameters.leaves[i] for i in indices]
            clipping = ExampleClipping(limit, settings.target, settings.policy)
            own = [gradients[i] for i in indices]
            kinds = [(tuple(x.shape), settings.dtype_of_sums or precise(x.dtype)) for x in leaves]
            totals, norm = clipped_sums(by, backend, own, kinds, clipping, inside)
            sums.update(zip(indices, totals, strict=True))
            wide = "float64" in [precise(x.dtype) for x in leaves]
            norms.append(backend.leave_scalar(norm.product(), "float64" if wide else "float32", arrays[:1]))
    total = parameters.rebuild([sums[i] for i in range(len(sums))])
    return total, norms[0] if grouping.shape is None else grouping.shape.arrange(norms)


def precise(dtype: Any) -> str:
    """Return the dtype of a sum or norm of numbers of a dtype: "float64" or "float32"."""
    return "float64" if format_named(bare_name(dtype)) is FLOAT64 else "float32"
