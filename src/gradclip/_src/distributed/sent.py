"""What one process sends: its part of a norm, or of each of many, and its flags; sums that one may fail to compute."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from gradclip._src.backends.torch.process_groups import rank
from gradclip._src.core import accumulators
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.holders import Held
from gradclip._src.core.layouts import Groups, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import Backend, HostBackend, is_concrete
from gradclip._src.core.values import Array
from gradclip._src.words import listed


@dataclass(frozen=True)
class Failed:
    """Stands for a number that processes failed to compute, and for each sum with it."""

    told: frozenset[str]

    def __add__(self, other: object) -> "Failed":
        return Failed(self.told | other.told) if isinstance(other, Failed) else self

    __radd__ = __add__


class Attempts:
    """Computes numbers of this process, and keeps an error until the other processes have heard of it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def of(self, compute: Callable[[], Any]) -> Any:
        """Return a number, or what stands for it."""
        try:
            return compute()
        except Exception as error:
            self._error = error
            return Failed(frozenset([f"rank {rank()}: {type(error).__name__}: {error}"]))

    def check(self, totals: Iterable[object]) -> None:
        """Raise this process's error, or a RuntimeError if sums lack a number of another process."""
        if self._error is not None:
            raise self._error
        told = sorted({one for total in totals if isinstance(total, Failed) for one in total.told})
        if told:
            raise_failed(told)


def raise_failed(problems: Sequence[str]) -> NoReturn:
    """Raise a RuntimeError that tells the problems of other processes."""
    raise RuntimeError(
        "the call failed on another process, so the norm over all processes is unknown: "
        f"{listed(problems, '; ')} Nothing has been changed."
    )


def filled(xp: ModuleType, norm: Norm, order: Order, arrays: Arrays) -> list[Any]:
    """Return the accumulators that this process sends, computed from `norm`, the norm of `arrays`."""
    return accumulators.filled(xp, _with_floor(xp, norm), order, empty=not arrays.elements())


def filled_each(backend: Backend, held: Held, order: Order) -> tuple[list[Any], Any]:
    """Return the same for the norms of a layout, as vectors, and whether all of the norms are finite."""
    xp = backend.xp
    norm = _in_host_memory(backend, held, order) if is_concrete(backend) else _on_device(backend, held, order)
    empty = backend.booleans(_empty(held)) if order.p < 0 else False
    return accumulators.filled(xp, norm, order, empty=empty), xp.all(xp.isfinite(norm.value))


def flags(backend: Backend, arrays: Arrays, norms: float, finite: Array) -> list[Any]:
    """Return this process's four flags, given the number of norms that it measured and whether all are finite."""
    numbers = [float(norms), float(FLOAT64 in arrays.formats), 0.0, 0.0]
    holders, *others = (backend.scalar(number, arrays) for number in numbers)
    return [backend.xp.where(finite, holders, math.inf), *others]


def _with_floor(xp: ModuleType, norm: Norm) -> Norm:
    """Return the norm with its floor added, because the accumulators have no place for it."""
    if not norm.floor:
        return norm
    added = norm.floor if norm.divisor is None else norm.floor / norm.divisor
    return replace(norm, value=xp.where(norm.value > 0, norm.value + added, norm.value), floor=0.0)


def _in_host_memory(backend: HostBackend, held: Held, order: Order) -> Norm:
    """Return the norms that one look settles; those of the other parts are measured part by part."""
    arrays, layout = held
    found = backend.norms(arrays, order, layout)
    sure = np.broadcast_to(found.sure, layout.count)
    if sure.all():
        return found
    value, divisor = np.where(sure, 1.0, 0.0), np.where(sure, found.value, 1.0)
    error: Any = np.array(np.broadcast_to(found.error, layout.count))
    for number in layout.parts_of(~sure):
        indices, scope = layout.part(number)
        one = _with_floor(backend.xp, backend.norms(backend.chosen(arrays, indices), order, scope))
        places, finite = layout.places(number), np.ravel(np.isfinite(one.value))
        if one.divisor is None:  # the norm itself is the magnitude, as where one look settles it
            value[places] = np.where(finite, 1.0, np.ravel(one.value))
            divisor[places] = np.where(finite, np.ravel(one.value), 1.0)
        else:
            value[places], divisor[places] = np.ravel(one.value), np.ravel(one.divisor)
        error[places] = one.error
    return Norm(value, divisor, error, 0.0)


def _on_device(backend: Backend, held: Held, order: Order) -> Norm:
    arrays, layout = held
    xp = backend.xp
    if not layout.number:
        return Norm(backend.zeros((0,), ()), None, 0.0, 0.0)
    if isinstance(layout, Groups):
        return _with_floor(xp, backend.norms(arrays, order, layout))
    each = [backend.norms(backend.chosen(arrays, [i]), order, scope) for i, scope in enumerate(layout.scopes)]
    each = [_with_floor(xp, norm) for norm in each]
    plain = all(norm.divisor is None for norm in each)
    divisors = [xp.ones_like(norm.value) if norm.divisor is None else norm.divisor for norm in each]
    return Norm(
        xp.concat([xp.reshape(norm.value, (-1,)) for norm in each]),
        None if plain else xp.concat([xp.reshape(divisor, (-1,)) for divisor in divisors]),
        max(norm.error for norm in each),
        0.0,
    )


def _empty(held: Held) -> np.ndarray:
    """Return which norms cover no elements."""
    arrays, layout = held
    if isinstance(layout, Groups):
        return np.array([not sum(math.prod(arrays[i].shape) for i in group) for group in layout.groups], bool)
    counts = np.array([units.elements for units in layout.units])
    return counts[layout.array_of] == 0


def length(layout: Several, number: int) -> int:
    """Return how many norms a part has."""
    places = layout.places(number)
    return int(places.stop - places.start)


def joined(xp: ModuleType, parts: Sequence[Any]) -> Any:
    """Return vectors as one."""
    return parts[0] if len(parts) == 1 else xp.concat(list(parts))
