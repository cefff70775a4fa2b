"""The fast path: ordinary calls in a few steps, with plain Python numbers.

A call is ordinary if one process makes it, the kernels read all arrays, the threshold is a number or a scalar array in
host memory, the order is 1, 2 or infinite, and the norm is finite and clearly on one side of the threshold. The general
path would do the same arithmetic and return the same bits, through a hundred functions. If a call is not ordinary,
these functions change nothing and return None. The general path then takes over, and raises any errors.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from gradclip.arguments import check_threshold
from gradclip.backends import among_several
from gradclip.backends.host.protocol import HostBackend
from gradclip.backends.registry import framework_of
from gradclip.backends.sums import ENOUGH, kernels_sum_error
from gradclip.core.arrays import Arrays
from gradclip.core.coefficient import KEPT, of_number
from gradclip.core.formats import FLOAT64
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order, norm_dtype, relative_error
from gradclip.typing import Parameters

if TYPE_CHECKING:
    from gradclip.native._kernels import Arrays as KernelArrays

_LARGEST_NORM = 2.0**127  # fits a float32 scalar


class Ordinary(NamedTuple):
    """Arrays that the kernels can all read, with their backend and the framework's own arrays."""

    backend: HostBackend
    known: "KernelArrays"
    leaves: Sequence[Any]

    def arrays(self) -> Arrays:
        """Return the same as the `Arrays` that the pipeline takes."""
        return self.backend.arrays_of(self.leaves, self.known)


class _Norm(NamedTuple):
    value: float
    error: float
    dtype: str  # of the returned scalar


def known_threshold(max_norm: object) -> float | None:
    """Return a threshold that is a number, or a scalar array in host memory without a derivative; else None.

    None also for an array that is no threshold: the general path raises the error, after those that come before it.
    """
    if type(max_norm) is float or (type(max_norm) is int and 0 <= max_norm <= 2**53):
        return max_norm
    framework = framework_of(max_norm) if getattr(max_norm, "shape", None) == () else None
    backend = framework.on_fast_path([max_norm]) if framework else None
    if backend is None or not backend.plain([max_norm]):
        return None
    try:
        return check_threshold(max_norm, backend=backend)
    except (TypeError, ValueError):
        return None


def known_thresholds(max_norms: Sequence[object]) -> list[float] | None:
    """Return the same for each of several thresholds; None if one of them is None."""
    if max_norms and all(one is max_norms[0] for one in max_norms):
        first = known_threshold(max_norms[0])
        found = [first] * len(max_norms)
    else:
        found = list(map(known_threshold, max_norms))
    known = [one for one in found if one is not None and one >= 0]
    return known if len(known) == len(found) else None


def reusable(parameters: Parameters) -> Parameters:
    """Return parameters that can be read twice: the items of a non-empty iterator as a list, else the parameters."""
    return (list(parameters) or parameters) if isinstance(parameters, Iterator) else parameters


def grad_norm(parameters: object, ord: object) -> Any:
    """Return the norm of gradients as a scalar of their framework."""
    return _norm_of(gradients(parameters), ord)


def global_norm(tree: object, ord: object) -> Any:
    """Return the norm of a tree as a scalar of its framework."""
    return _norm_of(read(optree.tree_leaves(tree)), ord)


def clip_grad_norm_(
    parameters: object, max_norm: object, ord: object, nonfinite: object, each: list[float] | None = None
) -> Any:
    """Clip gradients in place; return their norm as a scalar of their framework.

    If `each` is a list, the sum of the powers of each gradient is written to it.
    """
    given = gradients(parameters)
    threshold = known_threshold(max_norm) if given is not None and given.known.writable else None
    if given is None or threshold is None:
        return None
    # Check only now: with several processes, which never get here, an error must reach all of them.
    order, _ = Order.parse(ord), Nonfinite.named(nonfinite)
    norm = measured(given, order, each)
    factors = norm and of_number(norm.value, norm.error, threshold)
    if norm is None or factors is None:
        return None
    if factors is not KEPT:
        given.known.scale(given.known, factors[0], factors[1], given.backend.threads())
        given.backend.wrote(given.leaves)
    return given.backend.number(norm.value, norm.dtype)


def clip_by_global_norm(tree: object, max_norm: object, order: Order) -> tuple[Any, Any] | None:
    """Return a new tree, clipped, and the norm as a scalar of its framework."""
    leaves, structure = optree.tree_flatten(tree)
    given = read(leaves)
    threshold = known_threshold(max_norm) if given is not None and given.known.in_order else None
    if given is None or threshold is None:
        return None
    norm = measured(given, order)
    factors = norm and of_number(norm.value, norm.error, threshold)
    if norm is None or factors is None:
        return None
    results = given.backend.new_like(leaves, copied=factors is KEPT)
    if factors is not KEPT:
        places = given.backend.known(results)
        if places is None:
            return None
        given.known.scale(places, factors[0], factors[1], given.backend.threads())
    return optree.tree_unflatten(structure, results), given.backend.number(norm.value, norm.dtype)


def gradients(parameters: object) -> Ordinary | None:
    """Return the gradients of parameters, or a tree of arrays that are gradients; None if some share memory."""
    listed, in_tree = [parameters], False
    if isinstance(parameters, list | tuple):
        listed = list(parameters)
    elif type(parameters) is dict:
        listed = optree.tree_leaves(parameters)
        in_tree = set(map(type, listed)) == {np.ndarray}
        listed = listed if in_tree else list(parameters.values())
    framework = framework_of(listed[0]) if listed else None
    if framework is None or among_several() or (not in_tree and isinstance(listed[0], np.ndarray)):
        return None
    leaves = listed if in_tree else framework.gradients_of(listed)
    if not leaves:
        return None
    found = _known(framework.on_fast_path(leaves), leaves)
    return None if found is None or found.known.overlap() else found


def read(leaves: Sequence[Any]) -> Ordinary | None:
    """Return the leaves of a tree, if no derivative is requested for it."""
    framework = framework_of(leaves[0]) if leaves else None
    backend = framework.on_fast_path(leaves) if framework else None
    return _known(backend, leaves) if backend and backend.plain(leaves) else None


def _known(backend: HostBackend | None, leaves: Sequence[Any]) -> Ordinary | None:
    known = backend.known(leaves) if backend else None
    return Ordinary(backend, known, leaves) if backend and known else None


def _norm_of(given: Ordinary | None, ord: object) -> Any:
    norm = measured(given, Order.parse(ord)) if given else None
    return given.backend.number(norm.value, norm.dtype) if given and norm else None


def measured(given: Ordinary, order: Order, each: list[float] | None = None) -> _Norm | None:
    """Return the global norm if one pass settles it; put the sum of each array in `each`, if given."""
    known, threads, dtypes = given.known, given.backend.threads(), tuple(given.known.dtypes)
    arrays, error = alike(dtypes), 0.0
    if arrays.any_complex or order.p not in (1, 2, math.inf if each is None else 2):
        return None
    if order.extreme:
        value, _, nonfinite = known.extremes(threads)
        if nonfinite:
            return None
    else:
        if each is None:
            total, _ = known.sum(order.p, 1.0, arrays.only_halves, threads)
        else:
            *each[:], total = known.sums_of_each(order.p, arrays.only_halves, threads)
        # The sum shows whether terms underflowed. Powers of narrower dtypes never do.
        if not total > (ENOUGH if FLOAT64 in arrays.formats else -1.0):
            return None
        value = math.sqrt(total) if order.p == 2 else total
        error = error_of_norm(known.count, order, dtypes)
    return _Norm(value, error, dtype_of_norm(dtypes)) if value < _LARGEST_NORM else None


@lru_cache(maxsize=64)
def alike(dtypes: tuple[str, ...]) -> Arrays:
    """Return an empty collection with these dtypes, to ask questions that depend on dtypes alone."""
    return Arrays((), dtypes)


@lru_cache(maxsize=64)
def dtype_of_norm(dtypes: tuple[str, ...]) -> str:
    """Return the dtype of the returned norm of arrays of these dtypes."""
    return norm_dtype(alike(dtypes))


@lru_cache(maxsize=64)
def error_of_norm(count: int, order: Order, dtypes: tuple[str, ...]) -> float:
    """Return a bound on the relative error of the norm of `count` elements that the kernels add."""
    return relative_error(order, kernels_sum_error(count, alike(dtypes).only_halves, order.p), FLOAT64, exact=False)
