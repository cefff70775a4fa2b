"""The fast path: ordinary calls in few steps, with plain numbers of Python.

A call is ordinary where one process asks, the kernels read all arrays, the threshold is a number, the order is 1, 2 or
infinite, and the norm is finite and clearly on one side of the threshold. The general path would do the same
arithmetic, and come to the same bits, through a hundred functions. For what is not ordinary these functions return
None, and nothing has been changed. The general path then looks closer, and raises what is to be raised.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import optree

from gradclip.backends import among_several
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.protocols import HostBackend
from gradclip.backends.registry import framework_of
from gradclip.backends.sums import ENOUGH, kernels_sum_error
from gradclip.core.coefficient import KEPT, of_number
from gradclip.core.nonfinite import Nonfinite
from gradclip.core.norms import Order, norm_dtype, relative_error
from gradclip.typing import Parameters

if TYPE_CHECKING:
    from gradclip.native._kernels import Arrays as KernelArrays

_LARGEST_NORM = 2.0**127  # a scalar of float32 can hold it


class Ordinary(NamedTuple):
    """Arrays that the kernels read, all of them, the backend they belong to, and what they are in the framework."""

    backend: HostBackend
    known: "KernelArrays"
    leaves: Sequence[Any]


class _Norm(NamedTuple):
    value: float
    error: float
    dtype: str  # in which it is handed out


def is_number(max_norm: object) -> TypeGuard[float]:
    """Say whether a threshold is a number of Python that a float holds exactly."""
    return type(max_norm) is float or (type(max_norm) is int and 0 <= max_norm <= 2**53)


def reusable(parameters: Parameters) -> Parameters:
    """Return parameters that can be read twice: those that an iterator yields, if any, as a list."""
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
    """Clip gradients where they lie; return their norm as a scalar of their framework.

    Where a list is given, the sum of the powers of each gradient is put in there.
    """
    if not is_number(max_norm):
        return None
    given = gradients(parameters)
    if given is None or not given.known.writable:
        return None
    # Only now: of several processes, which have no gradients here, each must hear of an error.
    order, _ = Order.parse(ord), Nonfinite.named(nonfinite)
    norm = measured(given, order, each)
    factors = norm and of_number(norm.value, norm.error, max_norm)
    if norm is None or factors is None:
        return None
    if factors is not KEPT:
        given.known.scale(given.known, factors[0], factors[1], given.backend.threads())
        given.backend.wrote(given.leaves)
    return given.backend.number(norm.value, norm.dtype)


def clip_by_global_norm(tree: object, max_norm: object, order: Order) -> tuple[Any, Any] | None:
    """Return a new tree, clipped, and the norm as a scalar of its framework."""
    if not is_number(max_norm):
        return None
    leaves, structure = optree.tree_flatten(tree)
    given = read(leaves)
    if given is None or not given.known.in_order:
        return None
    norm = measured(given, order)
    factors = norm and of_number(norm.value, norm.error, max_norm)
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
    kind, listed = type(parameters), [parameters]
    if isinstance(parameters, list | tuple):
        listed = list(parameters)
    elif kind is dict:
        listed = optree.tree_leaves(parameters)
    framework = framework_of(listed[0]) if listed else None
    if framework is None or among_several():
        return None
    leaves = framework.gradients_of(listed) if kind is not dict else listed
    if not leaves or (kind is dict and set(map(type, leaves)) != {np.ndarray}):
        return None
    found = _known(framework.on_fast_path(leaves), leaves)
    return None if found is None or found.known.overlap() else found


def read(leaves: Sequence[Any]) -> Ordinary | None:
    """Return the leaves of a tree of which no derivative is asked for."""
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
    """Return the norm of the arrays together, if one reading settles it; put the sum of each in the list, if given."""
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
        # The sum shows whether terms were lost. Powers of narrower numbers never are.
        if not total > (ENOUGH if FLOAT64 in arrays.formats else -1.0):
            return None
        value = math.sqrt(total) if order.p == 2 else total
        error = error_of_norm(known.count, order, dtypes)
    return _Norm(value, error, dtype_of_norm(dtypes)) if value < _LARGEST_NORM else None


@lru_cache(maxsize=64)
def alike(dtypes: tuple[str, ...]) -> Arrays:
    """Return arrays of these dtypes, none at all, which answer what follows from dtypes alone."""
    return Arrays((), dtypes)


@lru_cache(maxsize=64)
def dtype_of_norm(dtypes: tuple[str, ...]) -> str:
    """Return the dtype in which the norm of arrays of these dtypes is handed out."""
    return norm_dtype(alike(dtypes))


@lru_cache(maxsize=64)
def error_of_norm(count: int, order: Order, dtypes: tuple[str, ...]) -> float:
    """Return a bound on the relative error of the norm of so many elements, added up by the kernels."""
    return relative_error(order, kernels_sum_error(count, alike(dtypes), order.p), FLOAT64, exact=False)
