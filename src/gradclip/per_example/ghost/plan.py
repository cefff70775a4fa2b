"""Which parameters' gradients are never made: the plan of a clipped function, and the table that says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradclip.core.values import shape_of
from gradclip.per_example.ghost.certificate import error_of_square
from gradclip.per_example.ghost.records import LeafUses, Place, Use
from gradclip.per_example.microbatches import bytes_of
from gradclip.tree import FlatTree

# Times are in those of one product of a float32 matrix multiplication. They were measured on processors.
_PASSES = 70.0
"""What writing and reading an element of a gradient costs, over the products that make it: in terms."""
_WIDE_SUM, _WIDE_GRAM = 2.7, 2.0
"""A product in float64, in a sum and in a Gram matrix."""
_ROW = 8.0
"""Adding an element of an embedding's row to a sum."""
WORTH = 2e6
"""What keeping a parameter's factors must save in a batch, so that its own operations are worth calling."""
SMALLEST = 2**12
"""The elements of a parameter below which its gradients are always made."""
_LARGE = 2**16
"""The elements of a parameter from which method="ghost" insists on factors."""
_MOST_BYTES = 2**30
"""The bytes of gradients above which factors are kept if they take fewer, even where they take more time."""


@dataclass(frozen=True)
class Cost:
    """What one way to measure a parameter costs for each example: time, and bytes held."""

    time: float
    bytes: int


@dataclass(frozen=True)
class PlannedLeaf:
    """How the gradient of one parameter is measured, and why.

    Attributes:
        path: the parameter's path in the tree.
        shape: its shape.
        uses: its uses in an example, such as "dot_general, T = 32".
        ghost: whether its gradients are measured and summed from factors, and never made.
        why: the reason.
        bytes_made: what the gradients of a batch would take.
        bytes_kept: what the factors take; None if there are none.
        terms: the most terms that an example has in one matrix; 0 if there are no factors.
    """

    path: str
    shape: tuple[int, ...]
    uses: str
    ghost: bool
    why: str
    bytes_made: int
    bytes_kept: int | None
    terms: int = 0


@dataclass(frozen=True)
class Plan:
    """How a clipped function measures the gradient of each parameter for a batch. `print` shows it as a table."""

    leaves: tuple[PlannedLeaf, ...]
    examples: int

    @property
    def ghost(self) -> bool:
        """Whether any gradient is never made."""
        return any(leaf.ghost for leaf in self.leaves)

    @property
    def cancels(self) -> bool:
        """Whether an example may have several terms in one matrix, which may cancel."""
        return any(leaf.ghost and leaf.terms > 1 for leaf in self.leaves)

    @property
    def tapped(self) -> tuple[bool, ...]:
        """For each parameter, whether its gradients come in factors."""
        return tuple(leaf.ghost for leaf in self.leaves)

    def __str__(self) -> str:
        head = ("parameter", "shape", "uses", "measured by", "MiB made", "MiB kept", "why")
        rows = [
            (
                leaf.path or "params",
                "x".join(map(str, leaf.shape)) or "scalar",
                leaf.uses or "-",
                "ghost" if leaf.ghost else "materialize",
                f"{leaf.bytes_made / 2**20:.1f}",
                "-" if leaf.bytes_kept is None else f"{leaf.bytes_kept / 2**20:.1f}",
                leaf.why,
            )
            for leaf in self.leaves
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))
        return "\n".join((f"for {self.examples} examples at a time", *lines))


def planned(uses: Sequence[LeafUses], examples: int, method: str) -> Plan:
    """Return the plan for so many examples at a time, by the method "auto" or "ghost".

    Raises ValueError for "ghost" if a large parameter cannot be measured from factors.
    """
    leaves = tuple(_planned(leaf, examples, method) for leaf in uses)
    wrong = [leaf for leaf in leaves if not leaf.ghost and math.prod(leaf.shape) >= _LARGE]
    if method == "ghost" and wrong:
        first = wrong[0]
        raise ValueError(
            f"method='ghost' cannot measure {first.path or 'the parameters'} of shape {first.shape} without making its "
            f"gradients: {first.why}. Pass method='auto' to make those alone, or change that operation."
        )
    return Plan(leaves, examples)


def made_everywhere(parameters: FlatTree, examples: int, why: str) -> Plan:
    """Return the plan that makes the gradient of every parameter."""
    leaves = [
        PlannedLeaf(path, shape_of(x), "", False, why, examples * bytes_of(x), None)
        for path, x in zip(parameters.paths(), parameters.leaves, strict=True)
    ]
    return Plan(tuple(leaves), examples)


def elements_of(leaf: object) -> int:
    """Return the number of elements of a parameter."""
    return math.prod(shape_of(leaf))


def _width(dtype: str) -> int:
    """Return the bytes of a number of a gradient. Half types are made in their own dtype."""
    return {"float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8, "complex128": 16}.get(dtype, 4)


def _planned(leaf: LeafUses, examples: int, method: str) -> PlannedLeaf:
    width = _width(leaf.dtype)
    made = Cost(_PASSES * math.prod(leaf.shape), math.prod(leaf.shape) * width)
    parts = parts_of(leaf.uses)
    named = ", ".join(f"{use.operation}, T = {use.terms}" for use in leaf.uses[:2]) + (", ..." if leaf.uses[2:] else "")
    wrong = leaf.reason or _unproven(parts)
    if wrong or not leaf.uses:
        why = wrong or "not used"
        return PlannedLeaf(leaf.path, leaf.shape, named, False, why, made.bytes * examples, None)
    kept = _cost_of_factors(parts, width)
    made = Cost(made.time + sum(_products(part) for part in parts), made.bytes)
    saved = (made.time - kept.time) * examples
    small = math.prod(leaf.shape) < SMALLEST
    if small:
        ghost, why = False, "small"
    elif method == "ghost":
        ghost, why = True, "asked for"
    elif made.bytes * examples > _MOST_BYTES and kept.bytes < made.bytes:
        ghost, why = True, "saves memory"
    else:
        ghost = saved > WORTH
        why = f"{made.time / kept.time:.1f} times less work" if ghost else "small" if saved > 0 else _more(made, kept)
    terms = max(sum(use.terms for use in part) for part in parts)
    return PlannedLeaf(leaf.path, leaf.shape, named, ghost, why, made.bytes * examples, kept.bytes * examples, terms)


def _more(made: Cost, kept: Cost) -> str:
    return f"factors are {kept.time / made.time:.1f} times the work"


def parts_of(uses: Sequence[Use]) -> list[list[Use]]:
    """Return the uses of each place."""
    places: dict[Place, list[Use]] = {}
    for use in uses:
        places.setdefault(use.place, []).append(use)
    return list(places.values())


def _unproven(parts: Sequence[Sequence[Use]]) -> str:
    for part in parts:
        _, rows, columns = part[0].place.shape
        if error_of_square(rows, columns, sum(use.terms for use in part)) is None:
            return "no bound is proven for so many terms"
    return ""


def _products(part: Sequence[Use]) -> float:
    """Return the products that make the gradient of a part."""
    blocks, rows, columns = part[0].place.shape
    return float(sum(use.terms * (columns if use.embedding else rows * columns) for use in part) * blocks)


def _cost_of_factors(parts: Sequence[Sequence[Use]], width: int) -> Cost:
    time, held = 0.0, 0
    for part in parts:
        blocks, rows, columns = part[0].place.shape
        dense = sum(use.terms for use in part if not use.embedding)
        embedded = sum(use.terms for use in part if use.embedding)
        gram = dense**2 * (rows + columns) + embedded * (embedded + 2 * dense) * columns
        time += blocks * (_WIDE_GRAM * gram + _WIDE_SUM * dense * rows * columns + _ROW * embedded * columns)
        held += width * blocks * (dense * (rows + columns) + embedded * (columns + 1))
    return Cost(time, held)
