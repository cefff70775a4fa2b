"""The fast path of many layers, each one array with its own norm: one call measures all, and one scales them.

A call is ordinary as defined in `fast_path`; in addition, all arrays must have one dtype. If a layer is not
ordinary, or its norm is so close to its threshold that the error bound does not decide, these functions return None and
the general path takes over.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from gradclip.backends.sums import ENOUGH
from gradclip.core.coefficient import coefficient, open_between
from gradclip.core.formats import FLOAT64
from gradclip.core.norms import Norm, Order, Partial, rooted
from gradclip.fast_path import Ordinary, alike, dtype_of_norm, error_of_norm, gradients, is_number, read
from gradclip.layers.at_once import factors_of_groups

if TYPE_CHECKING:
    from gradclip.native._kernels import Arrays as KernelArrays


def layer_norms(tree: object, order: Order) -> Any:
    """Return a tree of the norms of all leaves, scalars of their framework."""
    leaves, structure = optree.tree_flatten(tree)
    given = read(leaves)
    if given is None:
        return None
    with given.backend.precision():
        norm = _measured(given, order)
        return optree.tree_unflatten(structure, _scalars(given, norm)) if norm else None


def clip_by_layer_norm(tree: object, max_norm: object, order: Order) -> tuple[Any, Any] | None:
    """Return a new tree, each leaf clipped by its own norm, and a tree of the norms."""
    leaves, structure = optree.tree_flatten(tree)
    thresholds = [max_norm] * len(leaves)
    if not is_number(max_norm):
        thresholds, shape = optree.tree_flatten(max_norm)
        if shape != structure:
            return None
    given = read(leaves)
    if given is None or not given.known.in_order:
        return None
    results = given.backend.new_like(leaves, copied=False)
    with given.backend.precision():
        found = _scaled(given, given.backend.known(results), thresholds, order)
        if found is None:
            return None
        norms = _scalars(given, found[0])
    return optree.tree_unflatten(structure, results), optree.tree_unflatten(structure, norms)


def clip_grad_layer_norm_(parameters: object, max_norm: object, order: Order) -> list[Any] | None:
    """Clip each gradient of a list in place by its own norm; return the norms."""
    given = gradients(parameters) if isinstance(parameters, list) else None
    if given is None or not isinstance(parameters, list) or not given.known.writable:
        return None
    thresholds = [max_norm] * len(given.leaves) if is_number(max_norm) else max_norm
    if not isinstance(thresholds, list) or not len(thresholds) == len(given.leaves) == len(parameters):
        return None
    with given.backend.precision():
        found = _scaled(given, given.known, thresholds, order)
        if found is None:
            return None
        norm, kept = found
        given.backend.wrote([leaf for leaf, keep in zip(given.leaves, kept, strict=True) if not keep])
        return _scalars(given, norm)


def _measured(given: Ordinary, order: Order) -> Norm | None:
    """Return the norms as a vector, if one pass over the arrays settles all of them."""
    known, dtypes = given.known, tuple(given.known.dtypes)
    arrays, many = alike(dtypes), len(given.leaves)
    if order.p not in (1, 2) or arrays.any_complex or len(dtypes) > 1:
        return None
    sums = np.array(known.group_sums(range(many), many, order.p, arrays.only_halves, given.backend.threads()))
    if not (np.isfinite(sums) & (sums > (ENOUGH if FLOAT64 in arrays.formats else -1.0))).all():
        return None
    errors: Any = np.array([error_of_norm(count, order, dtypes) for count in known.counts])
    return Norm(rooted(given.backend, Partial(sums, None), order), None, errors, 0.0)


def _scaled(
    given: Ordinary, to: "KernelArrays | None", thresholds: Sequence[object], order: Order
) -> tuple[Norm, list[bool]] | None:
    """Scale each layer that exceeds its threshold; return the norms, and which layers are kept.

    Return None if the layers must be decided one by one.
    """
    max_norms = np.array([one if is_number(one) else -1.0 for one in thresholds])
    norm = _measured(given, order) if to is not None and (max_norms >= 0).all() else None
    undecided: Any = norm and open_between(norm, max_norms)
    if norm is None or to is None or undecided.any():
        return None
    chosen = coefficient(given.backend, norm, max_norms, split="float64" in given.known.dtypes)
    kept = chosen.keep.tolist()
    given.known.scale_groups(to, range(len(kept)), kept, factors_of_groups(chosen), given.backend.threads())
    return norm, kept


def _scalars(given: Ordinary, norm: Norm) -> list[Any]:
    dtype = dtype_of_norm(tuple(given.known.dtypes))
    return given.backend.leave_scalars(norm.value, dtype, given.leaves)
