"""Several norms at once, in host memory: what one look at all of them decides, and what is left to decide part by part.

A norm is decided here if it is finite, lost nothing to underflow, and is so far from its threshold that the error bound
tells which is larger. It then gets the coefficient that it would get alone. The pipeline decides the other parts,
usually few or none, one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import coefficient, needs_split, open_between
from gradclip._src.core.formats import FLOAT64, format_of
from gradclip._src.core.holders import ALONE, Holders
from gradclip._src.core.layouts import Groups, Layout, Scope, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import Backend, HostBackend, is_concrete
from gradclip._src.core.rules import Coefficient, Factors

if TYPE_CHECKING:
    from gradclip._src.core.units import Adaptive


@dataclass(frozen=True)
class Each:
    """Thresholds, one for each part."""

    values: Sequence[Any]

    def at_once(self, backend: HostBackend, layout: Several, order: Order) -> tuple[np.ndarray, Any]:
        """Return a threshold for each norm, and which of them are sure."""
        return layout.each(self.values), True

    def of_part(self, backend: Backend, layout: Several, number: int, order: Order) -> Any:
        """Return the threshold of a part."""
        return self.values[number]


@dataclass(frozen=True)
class Following:
    """Thresholds that follow the norms of the units of parameters. `given`: the settings that are arrays.

    `layout` is that of the parameters, if it may differ from that of their gradients.
    """

    adaptive: "Adaptive"
    params: Arrays
    given: Sequence[Any] = ()
    layout: Several | None = None

    def at_once(self, backend: HostBackend, layout: Several, order: Order) -> tuple[np.ndarray, Any]:
        """Return a threshold for each norm, and which of them are sure."""
        if self.given:
            return np.zeros(layout.count), np.zeros(layout.count, bool)
        norm = backend.norms(self.params, order, layout)
        return np.asarray(self.adaptive.of_norm(backend, norm, self.params, ())), norm.sure

    def of_part(self, backend: Backend, layout: Several, number: int, order: Order) -> Any:
        """Return the thresholds of the units of a part."""
        indices, scope = layout.part(number)
        arrays = backend.chosen(self.params, indices)
        return self.adaptive.thresholds(backend, arrays, order, scope, self.given)


def together(thresholds: Sequence[float]) -> float | np.ndarray:
    """Return the thresholds as one number if all are equal, else as a vector."""
    first = thresholds[0]
    alike = all(one is first for one in thresholds) or len(set(thresholds)) == 1
    return first if alike else np.array(thresholds)


class Quick(NamedTuple):
    """The norms, the coefficient, and the numbers of the parts that are still to decide."""

    norm: Norm
    coefficient: Coefficient
    undecided: Sequence[int]


def quickly(
    backend: HostBackend, arrays: Arrays, layout: Several, order: Order, thresholds: Each | Following
) -> Quick | None:
    """Decide as many norms as possible with one look at all of them; None if that is none."""
    norm = backend.norms(arrays, order, layout)
    if not np.any(norm.sure):
        return None
    max_norms, known = thresholds.at_once(backend, layout, order)
    chosen = coefficient(backend, norm, max_norms, split=needs_split(backend, arrays))
    sure = norm.sure & known & ~np.asarray(open_between(norm, max_norms))
    return Quick(norm, chosen, () if sure.all() else layout.parts_of(~sure))


def in_lines(norm: Norm, chosen: Coefficient, count: int) -> np.ndarray:
    """Return so many norms and their coefficients as a table, in which those of single parts can be written over."""
    lines = np.empty((7, count))
    for line, values in zip(lines, (norm.product(), chosen.keep, chosen.blank, *chosen.factors()), strict=True):
        line[...] = 1.0 if values is None else np.ravel(values)
    return lines


def of_lines(lines: np.ndarray) -> tuple[Norm, Coefficient]:
    """Return the norms and coefficients of a table."""
    norms, keep, blank, *factors = lines
    wide, narrow = Factors(*factors[:2]), Factors(*factors[2:])
    return Norm(norms, None, 0.0, 0.0), Coefficient(keep != 0, blank != 0, wide, narrow)


def dtypes_of_norms(arrays: Arrays, layout: Several) -> dict[str, Sequence[int]]:
    """Return the parts whose norms have each dtype: float64 if an array of a part has that precision."""
    if FLOAT64 not in arrays.formats:
        return {"float32": range(layout.number)}
    wide = [True] * len(arrays) if len(arrays.formats) == 1 else [format_of(x) is FLOAT64 for x in arrays]
    found: dict[str, list[int]] = {}
    for number, part in enumerate(layout.parts):
        found.setdefault("float64" if any(wide[i] for i in part.indices) else "float32", []).append(number)
    return dict(found)


def left_norms(
    backend: Backend, layout: Layout, norm: Norm, arrays: Arrays, leaves: Sequence[Any], holders: Holders = ALONE
) -> list[Any]:
    """Return the norms of each part, or those of a scope, as scalars or arrays of the framework, near the leaves."""
    if isinstance(layout, Scope):
        return [backend.leave_scalar(norm.product(), holders.norm_dtype(arrays), leaves)]
    if not layout.number:
        return []
    values, found = norm.product(), dict.fromkeys(range(layout.number))
    dtypes = dtypes_of_norms(arrays, layout)
    for dtype, numbers in dtypes.items():
        if not is_concrete(backend):
            every = backend.unstacked([backend.leave_scalar(values, dtype, leaves)])[0]
            made = [every[number] for number in numbers]
        elif isinstance(layout, Groups):
            near = [[leaves[i] for i in layout.groups[number]] or leaves for number in numbers]
            made = backend.leave_each(values if len(numbers) == layout.count else values[numbers], dtype, near)
        else:
            each = layout.shaped(values)
            made = backend.leave_each([each[i] for i in numbers], dtype, [leaves[i] for i in numbers])
        found.update(zip(numbers, made, strict=True))
    return list(found.values())
