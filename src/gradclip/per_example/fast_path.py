"""The fast path of sums over examples: fewer steps for ordinary batches, with the same bits as the general path.

A batch is ordinary if the kernels can read it, each example is clipped as a whole to a number, without a grid, and the
first reading settles every norm in the mask. For any other batch the functions return None, and the general path takes
over.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from gradclip import native
from gradclip.backends.registry import framework_of
from gradclip.backends.sums import examples_norm_error
from gradclip.core.rules import Target, known_rule_for_sums
from gradclip.ordinary import Ordinary, kind_of, known_threshold, read
from gradclip.per_example.settings import PerExampleSettings
from gradclip.typing import Mask


def clip_examples(grads: object, settings: PerExampleSettings, mask: Mask) -> tuple[Any, Any, Any] | None:
    """Return the sums as a tree, the number of clipped examples, and the norms; None if the batch is not ordinary."""
    if settings.per_layer or settings.grid is not None:
        return None
    leaves, structure = optree.tree_flatten(grads)
    given = read(leaves)
    if given is None or not given.kernels.in_order or len({leaf.shape[:1] for leaf in leaves}) > 1:
        return None
    max_norm = known_threshold(settings.max_norm)
    if max_norm is None or not (mask is None or _is_ordinary(mask, leaves[0])):
        return None
    widths = [math.prod(leaf.shape[1:]) for leaf in leaves]
    if not leaves[0].ndim or not len(leaves[0]) or not sum(widths):
        return None
    with given.backend.precision():
        inside: Any = None if mask is None else given.backend.booleans(mask)
        found = _clipped(given, settings, float(max_norm), widths, inside)
    return found and (optree.tree_unflatten(structure, found[0]), *found[1:])


def _clipped(
    given: Ordinary, settings: PerExampleSettings, max_norm: float, widths: Sequence[int], inside: np.ndarray | None
) -> tuple[list[Any], Any, Any] | None:
    kind, array = kind_of(tuple(given.kernels.dtypes)), given.backend.array
    if kind.any_complex:
        return None
    totals, squares = _added(given, settings.target, max_norm, widths, inside)
    norms = np.sqrt(squares if inside is None else np.where(inside, squares, 0.0))
    measured = norms if inside is None else norms[inside]
    if not np.isfinite(measured).all() or (kind.enough > 0 and not (measured > math.sqrt(kind.enough)).all()):
        return None
    clipped = np.int64(np.count_nonzero(norms > max_norm))
    return _sums(given, settings, totals, widths), array(clipped, "int64"), array(norms, kind.dtype_of_norm)


def _is_ordinary(mask: Any, leaf: Any) -> bool:
    """Return whether a mask has a known boolean for each example, in a list or an array of the leaf's framework."""
    if isinstance(mask, list | tuple):
        return set(map(type, mask)) <= {bool} and (len(mask),) == leaf.shape[:1]
    framework = framework_of(mask) if type(mask) is type(leaf) else None
    known = framework is not None and framework.on_fast_path([mask]) is not None
    return known and "bool" in str(mask.dtype) and mask.shape == leaf.shape[:1]


def _added(
    given: Ordinary, target: Target, max_norm: float, widths: Sequence[int], inside: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums over examples, all leaves in one flat array, and the squares of the norms, in float64."""
    # The kernels read the squares first: NaN means that the example is left out.
    squares = np.zeros(len(given.leaves[0])) if inside is None else np.where(inside, 0.0, np.nan)
    totals = np.zeros(sum(widths))
    into = [native.kernels.describe_buffers([buffer])[0] for buffer in (squares, totals)]
    rule = known_rule_for_sums(target, max_norm, examples_norm_error(sum(widths), 2.0))
    native.kernels.add_examples(given.kernels, len(squares), rule, into[0], into[1], given.backend.threads())
    return totals, squares


def _sums(given: Ordinary, settings: PerExampleSettings, totals: np.ndarray, widths: Sequence[int]) -> list[Any]:
    """Return the sum over examples of each leaf as an array of the framework."""
    sums, start = [], 0
    for leaf, width in zip(given.leaves, widths, strict=True):
        own = "float64" if "64" in str(leaf.dtype) else "float32"  # no leaf is complex
        total = totals[start : start + width].reshape(leaf.shape[1:])
        sums.append(given.backend.array(total, settings.dtype_of_sums or own))
        start += width
    return sums
