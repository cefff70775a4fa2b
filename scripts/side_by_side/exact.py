"""Compute the right results: sums and comparisons with fractions, and roots to 100 digits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from side_by_side.formats import ULP, format_of, parts

DIGITS = Context(prec=100, Emax=10**6, Emin=-(10**6))
Leaves = Sequence[np.ndarray]
Numbers = list[Decimal | None]


@dataclass(frozen=True)
class Group:
    """Elements that share a norm, and the limit of norm**order; None means no limit.

    `members` maps the index of each leaf to the positions of the group's elements among the leaf's real numbers.
    """

    members: dict[int, np.ndarray]
    limit: Fraction | None

    def numbers(self, leaves: Leaves) -> np.ndarray:
        found = [parts(leaves[index])[places] for index, places in self.members.items()]
        return np.concatenate(found) if found else np.zeros(0)


class Exact(NamedTuple):
    """The exact result of each leaf, and the exact norms; None for a number that has no right answer."""

    leaves: list[Numbers]
    norms: Numbers


def whole(leaves: Leaves, index: int) -> np.ndarray:
    """Return the positions of all elements of a leaf."""
    return np.arange(parts(leaves[index]).size)


def power(threshold: float, order: float, times: Fraction = Fraction(1)) -> Fraction | None:
    """Return the limit of a group: threshold**order, times a factor."""
    if math.isinf(threshold):
        return None
    return Fraction(threshold) ** (1 if math.isinf(order) else int(order)) * times


def together(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """All elements share one norm."""
    return [Group({i: whole(leaves, i) for i in range(len(leaves))}, power(threshold, order))]


def each_leaf(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """The elements of a leaf share a norm."""
    return [Group({i: whole(leaves, i)}, power(threshold, order)) for i in range(len(leaves))]


def root_mean_square(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """Clip like `each_leaf`, to the threshold times the square root of the leaf's size."""
    return [Group({i: whole(leaves, i)}, power(threshold, order, Fraction(x.size))) for i, x in enumerate(leaves)]


def mean_norm(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """Clip like `each_leaf`, to the threshold times the leaf's size."""
    return [Group({i: whole(leaves, i)}, power(threshold, order, Fraction(x.size) ** 2)) for i, x in enumerate(leaves)]


def equal_shares(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """Clip like `each_leaf`, each of the K leaves to C / sqrt(K)."""
    share = Fraction(1, max(1, len(leaves)))
    return [Group({i: whole(leaves, i)}, power(threshold, order, share)) for i in range(len(leaves))]


def shares_by_size(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """Clip like `each_leaf`, a leaf with D_i of all D elements to C * sqrt(D_i / D)."""
    total = max(1, sum(x.size for x in leaves))
    return [
        Group({i: whole(leaves, i)}, power(threshold, order, Fraction(x.size, total))) for i, x in enumerate(leaves)
    ]


def rows(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """The elements along the last axis share a norm."""
    each = [whole(leaves, i).reshape(-1, max(1, x.shape[-1] if x.ndim else 1)) for i, x in enumerate(leaves)]
    return [Group({i: places}, power(threshold, order)) for i, units in enumerate(each) for places in units]


def columns(leaves: Leaves, threshold: float, order: float) -> list[Group]:
    """Each column of a matrix shares a norm, and so does each other leaf. Limits are for parameters that are all 1."""
    groups = []
    for index, leaf in enumerate(leaves):
        places = whole(leaves, index)
        # A complex number takes two adjacent positions.
        units = places.reshape(*leaf.shape, -1).swapaxes(0, 1) if leaf.ndim == 2 else [places]
        size = len(leaf) if leaf.ndim == 2 else leaf.size
        groups += [Group({index: np.ravel(unit)}, power(threshold, order, Fraction(size))) for unit in units]
    return groups


@dataclass(frozen=True)
class Rule:
    """Which elements share a norm, its order, and what else determines the clip coefficient.

    `added` is added to the norm before the division. `to_unit` divides the result by the threshold. `blanks` counts NaN
    and infinities as 0.
    """

    groups: Callable[[Leaves, float, float], list[Group]]
    order: float = 2
    added: float = 0.0
    to_unit: bool = False
    blanks: bool = False

    def exact(self, leaves: Leaves, threshold: float) -> Exact:
        if self.blanks:
            leaves = [np.where(np.isfinite(parts(x)), parts(x), 0.0) for x in leaves]
        found: list[Numbers] = [[None] * parts(x).size for x in leaves]
        norms: Numbers = []
        with localcontext(DIGITS):
            for group in self.groups(leaves, threshold, self.order):
                norm, factor = self._factor(group.numbers(leaves), group.limit, threshold)
                norms.append(norm)
                for index, places in group.members.items() if factor is not None else ():
                    values = parts(leaves[index])
                    for place in places.tolist():
                        found[index][place] = Decimal(float(values[place])) * factor
        return Exact(found, norms)

    def _factor(self, numbers: np.ndarray, limit: Fraction | None, threshold: float) -> tuple[Decimal | None, ...]:
        """Return the norm and the clip coefficient; None and None if some elements are not finite."""
        if not np.isfinite(numbers).all():
            return None, None
        total = power_sum(numbers, self.order)
        norm = _root(total, self.order)
        within = limit is None or total <= limit
        factor = Decimal(1) if within else _root(limit, self.order) / (norm + Decimal(self.added))
        if self.to_unit:
            factor = _to_unit(factor, norm, threshold)
        return norm, factor

    def excess(self, result: Leaves, given: Leaves, threshold: float) -> float:
        """Return the largest relative excess of a group's norm over its limit; 0 if no group exceeds it."""
        if self.to_unit:
            threshold = 1.0
        groups = [g for g in self.groups(given, threshold, self.order) if self._has_answer(g.numbers(given))]
        return max((_excess(g.numbers(result), g.limit, self.order) for g in groups), default=0.0)

    def _has_answer(self, numbers: np.ndarray) -> bool:
        return self.blanks or bool(np.isfinite(numbers).all())


def _to_unit(factor: Decimal, norm: Decimal, threshold: float) -> Decimal:
    if math.isinf(threshold):
        return Decimal(0)
    return factor / Decimal(threshold) if threshold else 1 / norm if norm else Decimal(1)


def power_sum(numbers: np.ndarray, order: float) -> Fraction:
    """Return the sum of magnitude**order, or the extreme magnitude for infinite orders."""
    values, counts = np.unique(np.abs(numbers), return_counts=True)
    magnitudes = list(map(Fraction, values.tolist()))
    if math.isinf(order):
        return (max if order > 0 else min)(magnitudes, default=Fraction(0))
    return sum((m ** int(order) * n for m, n in zip(magnitudes, counts.tolist(), strict=True)), Fraction(0))


def _root(total: Fraction, order: float) -> Decimal:
    number = Decimal(total.numerator) / Decimal(total.denominator)
    if order in (1, math.inf, -math.inf) or not number:
        return number
    return number.sqrt() if order == 2 else number ** (Decimal(1) / Decimal(int(order)))


def _excess(numbers: np.ndarray, limit: Fraction | None, order: float) -> float:
    if limit is None:
        return 0.0
    if not np.isfinite(numbers).all():
        return math.inf
    total = power_sum(numbers, order)
    if total <= limit:
        return 0.0
    with localcontext(DIGITS):
        return float(_root(total / limit, order) - 1) if limit else math.inf


@dataclass(frozen=True)
class Summed:
    """Clip each example on axis 0 of every leaf by a rule, then add them."""

    rule: Rule

    def exact(self, leaves: Leaves, threshold: float) -> Exact:
        each = [self.rule.exact([x[i] for x in leaves], threshold).leaves for i in range(_batch(leaves))]
        with localcontext(DIGITS):
            return Exact([[_sum(terms) for terms in zip(*leaf, strict=True)] for leaf in zip(*each, strict=True)], [])

    def excess(self, result: Leaves, given: Leaves, threshold: float) -> float:
        """Return by how much a sum of one example exceeds its limit plus one rounding to nearest; 0 for other sums."""
        if _batch(given) != 1:
            return 0.0
        rounding = max((ULP[format_of(x)] for x in result), default=0.0) / 2
        return max(0.0, self.rule.excess(result, [x[0] for x in given], threshold) - rounding)


def _batch(leaves: Leaves) -> int:
    return len(leaves[0]) if leaves else 0


def _sum(terms: Sequence[Decimal | None]) -> Decimal | None:
    return None if any(term is None for term in terms) else sum(terms, Decimal(0))


@dataclass(frozen=True)
class Clamp:
    """Clamp each element to the threshold; NaN stays NaN."""

    def exact(self, leaves: Leaves, threshold: float) -> Exact:
        return Exact([[_clamped(x, threshold) for x in parts(leaf).tolist()] for leaf in leaves], [])

    def excess(self, result: Leaves, given: Leaves, threshold: float) -> float:
        limit = power(threshold, math.inf)
        known = [parts(x)[~np.isnan(parts(y))] for x, y in zip(result, given, strict=True)]
        return max((_excess(x, limit, math.inf) for x in known), default=0.0)


def _clamped(value: float, threshold: float) -> Decimal | None:
    clamped = math.copysign(min(abs(value), threshold), value)
    return Decimal(clamped) if math.isfinite(value) or math.isfinite(clamped) else None


@dataclass(frozen=True)
class Norm:
    """Measure the norm of all elements without clipping."""

    order: float = 2

    def exact(self, leaves: Leaves, threshold: float) -> Exact:
        return Exact([], Rule(together, self.order).exact(leaves, math.inf).norms)

    def excess(self, result: Leaves, given: Leaves, threshold: float) -> float:
        """Return 0: there is no limit."""
        return 0.0
