"""Several norms in one call of the kernels, those of groups of arrays or of units, and scaling in place for any layout.

To the kernels a unit is a contiguous row of its array. Arrays with another layout in memory are copied so that their
units are rows; large arrays are not copied. Parts that the kernels cannot read are scaled one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradclip._src.backends.host import chunkwise
from gradclip._src.backends.host.arrays import HostArray, HostArrays, split, viewed_arrays
from gradclip._src.backends.sums import ENOUGH, examples_norm_error, kernels_norm_error
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.layouts import Groups, Layout, Rows, Several
from gradclip._src.core.norms import Norm, Order, norm_dtype
from gradclip._src.core.rules import Coefficient, Factors
from gradclip._src.native import Described, describe_buffers

if TYPE_CHECKING:
    from gradclip._src.core.rules import Coefficient, Factors
    from gradclip._src.native._kernels import Arrays as KernelArrays


_ALL_KEPT = 1
_COPIED = 1 << 16  # arrays up to this many elements are copied; the copy stays in cache

_Memory = tuple["KernelArrays", "KernelArrays", "KernelArrays"]
_AsRows = tuple["KernelArrays", Sequence[int], dict[int, tuple[np.ndarray, np.ndarray]]]


class Kind(NamedTuple):
    """What follows from the dtypes of arrays. A sum of powers above `enough` has lost nothing to underflow."""

    any_complex: bool
    only_halves: bool
    enough: float
    dtype_of_norm: str
    one_dtype: bool  # whether the norm of each of them is returned in the same dtype


@lru_cache(maxsize=64)
def kind_of(dtypes: Iterable[str]) -> Kind:
    """Return what follows from these dtypes."""
    arrays = Arrays((), dtypes)
    wide = FLOAT64 in arrays.formats
    # Powers of narrower dtypes never underflow.
    enough = ENOUGH if wide else -1.0
    one_dtype = not wide or len(arrays.formats) == 1
    return Kind(arrays.any_complex, arrays.only_halves, enough, norm_dtype(arrays), one_dtype)


def _described(numbers: np.ndarray) -> KernelArrays:
    return describe_buffers([numbers]).kernels


class Laid:
    """Arrays, some of whose norms the kernels compute in one call. `beyond`: the parts that they cannot read."""

    count: int  # of norms

    def __init__(self, kernels: KernelArrays, beyond: Sequence[int], kind: Kind, threads: int) -> None:
        # Not the arrays themselves: they keep this object.
        self.kernels, self.beyond, self.kind, self.threads = kernels, beyond, kind, threads
        # For each array that had to be copied to be rows, the view that was copied and the copy.
        self.copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def norms(self, order: Order) -> Norm | None:
        """Return the norms as a vector; None if the kernels do not compute norms of this order.

        A norm is sure if it is finite and nothing was lost to underflow.
        """
        if order.p not in (1, 2):
            return None
        sums = self.sums(order.p)
        sure = np.isfinite(sums)
        if self.kind.enough > 0:
            enough = sums > self.kind.enough
            # Squares may underflow, magnitudes do not: if their sum is 0, all elements are zero.
            sure &= enough | (self.sums(1.0) == 0) if (sums == 0).any() else enough
        return Norm(np.sqrt(sums) if order.p == 2 else sums, None, self.error(order), 0.0, sure)

    def sums(self, p: float) -> np.ndarray:
        """Return the sum of powers of each norm, NaN for those of parts `beyond`."""
        raise NotImplementedError

    def errors(self, p: float) -> list[float]:
        """Return a bound on the relative error of the norms of each group, or of each array of rows."""
        raise NotImplementedError

    def error(self, order: Order) -> Any:
        """Return the same: one number for all norms, or one for each."""
        raise NotImplementedError

    def scale(self, table: np.ndarray, to: KernelArrays | None = None) -> None:
        """Scale the arrays in place, or write all of them to `to`, the kernels' arrays.

        `table` has a line that says which norms keep their elements, the two factors of wide formats, and the two of
        narrow formats.
        """
        raise NotImplementedError

    def scale_copies(self, table: np.ndarray, results: Arrays) -> None:
        """Write the arrays, scaled, to copies of them, which are in the same memory order."""
        raise NotImplementedError

    def settle(self, p: float, max_norms: np.ndarray) -> Settled | None:
        """Return what one look decides, for one threshold or one for each norm; None if it leaves a norm open."""
        norms, table = np.empty(self.count), np.empty((5, self.count))
        memory = _described(max_norms), _described(norms), _described(table)
        answer = self.ask(p, memory)
        return Settled(self, norms, table, answer == _ALL_KEPT) if answer else None

    def ask(self, p: float, memory: _Memory) -> int:
        """Have the kernels settle norms, given the memory of thresholds, norms and the table."""
        raise NotImplementedError


class _Groups(Laid):
    def __init__(self, described: Described, layout: Groups, kind: Kind, threads: int) -> None:
        left_out = set(described.left_out)
        self.count = layout.count
        self.group_of: Sequence[int] = range(self.count)
        beyond: set[int] = set()
        if layout.numbers is not None and not left_out:
            self.group_of = layout.numbers
        elif left_out or not layout.alone:
            number_of = layout.group_of()
            beyond = {number_of[index] for index in left_out}
            self.group_of = [number_of[index] for index in sorted(number_of) if index not in left_out]
        super().__init__(described.kernels, sorted(beyond), kind, threads)

    def sums(self, p: float) -> np.ndarray:
        found = self.kernels.group_sums(self.group_of, self.count, p, self.kind.only_halves, self.threads)
        sums = np.array(found, float)
        sums[self.beyond] = np.nan
        return sums

    def errors(self, p: float) -> list[float]:
        counts, halves = self.kernels.counts, self.kind.only_halves
        if not isinstance(self.group_of, range):
            counts = np.bincount(self.group_of, counts, self.count).astype(np.int64).tolist()
        return [kernels_norm_error(count, p, halves) for count in counts]

    def error(self, order: Order) -> Any:
        errors = self.errors(order.p)
        return errors[0] if len(set(errors)) == 1 else np.array(errors)

    def scale(self, table: np.ndarray, to: KernelArrays | None = None) -> None:
        self.kernels.scale_groups(to or self.kernels, self.group_of, _described(table), self.count, self.threads)

    def ask(self, p: float, memory: _Memory) -> int:
        of, halves, enough = self.errors(p), self.kind.only_halves, self.kind.enough
        return self.kernels.settle_groups(self.group_of, p, halves, enough, of, *memory, threads=self.threads)


class _Rows(Laid):
    """`chosen`: where the rows are that the kernels read."""

    def __init__(self, rows: _AsRows, layout: Rows, kind: Kind, threads: int) -> None:
        kernels, known, copies = rows
        beyond = sorted(set(range(layout.number)).difference(known)) if len(known) < layout.number else ()
        super().__init__(kernels, beyond, kind, threads)
        self.layout, self.count, self.known, self.copies = layout, layout.count, known, copies
        self.counts = [layout.units[index].number for index in known]
        self.chosen: Any = np.flatnonzero(np.isin(layout.array_of, known)) if self.beyond else slice(None)

    def sums(self, p: float) -> np.ndarray:
        sums, of_known = np.full(self.layout.count, np.nan), np.empty(sum(self.counts))
        self.kernels.sum_rows(self.counts, p, _described(of_known), self.threads)
        sums[self.chosen] = of_known
        return sums

    def errors(self, p: float) -> list[float]:
        return [examples_norm_error(units.elements, p) for units in self.layout.units]

    def error(self, order: Order) -> Any:
        return np.array(self.errors(order.p))[self.layout.array_of]

    def scale(self, table: np.ndarray, to: KernelArrays | None = None) -> None:
        lines = np.ascontiguousarray(table[:, self.chosen])
        self.kernels.scale_rows(to or self.kernels, self.counts, _described(lines), self.threads)
        for number in self.layout.parts_of(table[0] == 0) if self.copies and to is None else ():
            if number in self.copies:
                rows, copy = self.copies[number]
                rows[...] = copy

    def scale_copies(self, table: np.ndarray, results: Arrays) -> None:
        places = [_rows(x, units.own) for x, units in zip(results, self.layout.units, strict=True)]
        rows = describe_buffers([self.copies[i][1] if i in self.copies else places[i] for i in self.known])
        self.scale(table, rows.kernels)
        for number, (_, copy) in self.copies.items():
            places[number][...] = copy

    def ask(self, p: float, memory: _Memory) -> int:
        errors, enough = self.errors(p), self.kind.enough
        return self.kernels.settle_rows(self.counts, p, enough, errors, *memory, threads=self.threads)


class Settled(NamedTuple):
    """Norms, and the table by which `Laid.scale` scales their arrays."""

    parts: Laid
    norms: np.ndarray
    table: np.ndarray
    all_kept: bool


def laid(arrays: Arrays, layout: Several, threads: int) -> Laid | None:
    """Return the arrays as the kernels see them; None if they can read none of them. Kept beside the arrays."""
    if not isinstance(arrays, HostArrays):
        return None
    if arrays.laid is None or arrays.laid[0] is not layout:
        kind = kind_of(arrays.dtypes)._replace(only_halves=arrays.only_halves)
        if isinstance(layout, Groups):
            made: Laid = _Groups(Described(arrays.kernels, arrays.left_out), layout, kind, threads)
        else:
            made = _Rows(_as_rows(arrays, layout), layout, kind, threads)
        arrays.laid = layout, made
    found: Laid = arrays.laid[1]
    return found if found.kernels else None


def laid_plainly(kernels: KernelArrays, layout: Several, kind: Kind, threads: int) -> Laid | None:
    """Return the same for arrays that the kernels read as they are; None if their units are no rows."""
    if isinstance(layout, Groups):
        return _Groups(Described(kernels, ()), layout, kind, threads)
    if layout.outputs_first and kernels.in_order:
        return _Rows((kernels, range(layout.number), {}), layout, kind, threads)
    return None


def forget_copies(arrays: Arrays) -> None:
    """Read the arrays again when they are asked for next: their values have changed."""
    if isinstance(arrays, HostArrays):
        arrays.laid = None


def scale_parts(
    arrays: Arrays, coefficient: Coefficient, layout: Several, threads: int, scale_: Callable[..., None]
) -> None:
    """Scale the arrays in place; `scale_` scales one part. Elements that the coefficient keeps are not written."""
    at_once = laid(arrays, layout, threads)
    one_by_one = set(layout.parts_of(coefficient.blank)) if np.any(coefficient.blank) else set()
    one_by_one.update(range(layout.number) if at_once is None else at_once.beyond)
    keep = coefficient.keep
    for number in one_by_one.intersection(layout.parts_of(~keep)):
        keep = keep.copy() if keep is coefficient.keep else keep
        keep[layout.places(number)] = True
        indices, scope = layout.part(number)
        of_part = viewed_arrays([arrays[index] for index in indices])
        scale_(of_part, entry(coefficient, layout, number), scope, threads)
    if at_once is not None and not keep.all():
        at_once.scale(table_of(keep, coefficient))


def entry(coefficient: Coefficient, layout: Several, number: int) -> Coefficient:
    """Return the coefficient of one part."""
    places, shape = layout.places(number), () if isinstance(layout, Groups) else layout.units[number].norms_shape
    factors = [1.0 if x is None else x for x in coefficient.factors()]
    wide = [np.broadcast_to(x, layout.count)[places].reshape(shape)[()] for x in factors]
    # NumPy would multiply float32 numbers by float64 ones in float64.
    narrow = [x.astype(np.float32) for x in wide[2:]]
    flags = [x[places].reshape(shape)[()] for x in (coefficient.keep, coefficient.blank)]
    return Coefficient(flags[0], flags[1], Factors(*wide[:2]), Factors(*narrow))


def table_of(keep: np.ndarray, coefficient: Coefficient) -> np.ndarray:
    """Return the table that `Laid.scale` reads."""
    table = np.empty((5, len(keep)))
    for line, values in zip(table, (keep, *coefficient.factors()), strict=True):
        line[...] = 1.0 if values is None else values
    return table


def _as_rows(arrays: HostArrays, layout: Rows) -> _AsRows:
    """Return the arrays whose units are rows to the kernels, their indices, and those that had to be copied."""
    numbers = list(range(len(arrays)))
    if layout.outputs_first and arrays.kernels and not arrays.left_out and arrays.kernels.in_order:
        return arrays.kernels, numbers, {}  # creating a view of each array would take long
    rows = [_rows(x, units.own) for x, units in zip(arrays, layout.units, strict=True)]
    numbers = [i for i in numbers if arrays[i].counted is None and _few_or_in_order(rows[i])]
    copies = {i: (rows[i], np.ascontiguousarray(rows[i])) for i in numbers if not rows[i].flags.c_contiguous}
    described = describe_buffers([copies[i][1] if i in copies else rows[i] for i in numbers])
    left_out = {numbers[place] for place in described.left_out}
    return described.kernels, [number for number in numbers if number not in left_out], copies


def _few_or_in_order(rows: np.ndarray) -> bool:
    return rows.flags.c_contiguous or rows.size <= _COPIED


def _rows(x: HostArray, own: tuple[int, ...]) -> np.ndarray:
    """Return a view with the own axes first and the other axes in memory order.

    The stride of an axis of one element may be any number, and is another one in a copy.
    """
    steps = [step if count > 1 else 0 for step, count in zip(x.data.strides, x.data.shape, strict=True)]
    others = [axis for axis in range(x.data.ndim) if axis not in own]
    return x.data.transpose(*own, *sorted(others, key=lambda axis: -steps[axis]))


def scale_(arrays: Arrays, coefficient: Coefficient, layout: Layout, threads: int) -> None:
    """Scale arrays by a coefficient with an entry for each norm. Elements that it keeps are not written."""
    if isinstance(layout, Groups | Rows):
        scale_parts(arrays, coefficient, layout, threads, scale_)
        return
    if not layout.whole:
        for x in () if coefficient.keep.all() else arrays:
            chunkwise.scale_rows(x, coefficient, layout)
        return
    # Gradients that are not clipped are not written: memory access is what takes time.
    if coefficient.keep:
        return
    known, others = split(arrays)
    if known:
        scale_known(known, known, coefficient, threads)
    for x in others:
        chunkwise.scale_chunks(x, coefficient)


def indices_written(arrays: Arrays, new: Arrays, coefficient: Coefficient, layout: Layout) -> Sequence[int]:
    """Return the indices of the arrays that change: of those not kept whole, and of those with elements to set to zero.

    `new` is a view of the arrays without non-finite elements, or the arrays themselves.
    """
    changed = _indices_scaled(coefficient, layout, len(arrays))
    if new is arrays or len(changed) == len(arrays):
        return changed
    kept = set(range(len(arrays))).difference(changed)
    return sorted([*changed, *(index for index in kept if any(chunkwise.count_nonfinite(arrays[index])))])


def _indices_scaled(coefficient: Coefficient, layout: Layout, count: int) -> Sequence[int]:
    if isinstance(layout, Groups | Rows):
        return [index for number in layout.parts_of(~coefficient.keep) for index in layout.part(number).indices]
    return () if np.all(coefficient.keep) else range(count)


def scale_known(known: KernelArrays, to: KernelArrays, coefficient: Coefficient, threads: int) -> None:
    """Write the kernels' arrays, scaled, to the arrays `to`."""
    if coefficient.blank:
        to.fill_zero(threads)
        return
    known.scale(to, _pair(coefficient.wide), _pair(coefficient.narrow), threads)


def _pair(factors: Factors) -> tuple[float, float]:
    return factors.first, 1.0 if factors.second is None else factors.second


def clamp_(arrays: Arrays, bound: float, threads: int) -> None:
    """Clamp arrays in place. Writes only chunks that change."""
    known, others = split(arrays)
    if known:
        known.clamp(bound, threads)
    for x in others:
        chunkwise.clamp_chunks(x, bound)
