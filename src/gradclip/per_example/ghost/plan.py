"""Which parameters' gradients are never made: the plan of a clipped function, and the table that says why."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradclip.core.values import shape_of
from gradclip.per_example.ghost.certificate import error_of_square
from gradclip.per_example.ghost.costs import Autograd, Costs, costs_of, parts_of
from gradclip.per_example.ghost.records import LeafUses, Use
from gradclip.per_example.microbatches import bytes_of
from gradclip.tree import FlatTree

SMALLEST = 2**12
"""The elements of a parameter below which its gradients are always made."""
_LARGE = 2**16
"""The elements of a parameter from which method="ghost" insists on factors."""
_WORTH = 2e6
"""What factors must save in a batch, in products, so that their own operations are worth calling."""
_MARGIN = 0.7
"""Factors are kept if they take at most so much of the time: the costs are estimates."""
_MOST_BYTES = 2**30
"""The bytes of gradients above which factors are kept if they take fewer, even where they take more time."""

How = Literal["ghost", "product", "autograd"]


@dataclass(frozen=True)
class PlannedLeaf:
    """How the gradient of one parameter is measured, and why.

    Attributes:
        path: the parameter's path in the tree.
        shape: its shape.
        uses: its uses in an example, such as "dot_general, T = 32".
        how: "ghost": its gradients are measured and summed from factors, and never made. "product": they are made, by
            one product of the factors. "autograd": the framework makes them.
        why: the reason.
        bytes_made: what the gradients of a batch would take.
        bytes_kept: what the factors take; None if there are none.
        terms: the most terms that an example has in one matrix; 0 if there are no factors.
    """

    path: str
    shape: tuple[int, ...]
    uses: str
    how: How
    why: str
    bytes_made: int
    bytes_kept: int | None
    terms: int = 0


@dataclass(frozen=True)
class Plan:
    """How a clipped function measures the gradient of each parameter for a batch. `print` shows it as a table."""

    leaves: tuple[PlannedLeaf, ...]
    examples: int
    program: Hashable = field(default="", repr=False, compare=False)  # equal only for functions that compute the same

    @property
    def ghost(self) -> bool:
        """Whether any gradient is never made."""
        return "ghost" in (leaf.how for leaf in self.leaves)

    @property
    def cancels(self) -> bool:
        """Whether an example may have several terms in one matrix, which may cancel."""
        return any(leaf.how == "ghost" and leaf.terms > 1 for leaf in self.leaves)

    @property
    def tapped(self) -> tuple[bool, ...]:
        """For each parameter, whether its gradients come in factors."""
        return tuple(leaf.how != "autograd" for leaf in self.leaves)

    @property
    def in_factors(self) -> bool:
        """Whether any gradient comes in factors."""
        return any(self.tapped)

    def __str__(self) -> str:
        head = ("parameter", "shape", "uses", "measured by", "MiB made", "MiB kept", "why")
        rows = [
            (
                leaf.path or "params",
                "x".join(map(str, leaf.shape)) or "scalar",
                leaf.uses or "-",
                leaf.how,
                f"{leaf.bytes_made / 2**20:.1f}",
                "-" if leaf.bytes_kept is None else f"{leaf.bytes_kept / 2**20:.1f}",
                leaf.why,
            )
            for leaf in self.leaves
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))
        return "\n".join((f"for {self.examples} examples at a time", *lines))


def planned(uses: Sequence[LeafUses], examples: int, method: str, autograd: Autograd) -> Plan:
    """Return the plan for so many examples at a time, by the method "auto" or "ghost".

    Raises ValueError for "ghost" if a large parameter cannot be measured from factors.
    """
    leaves = tuple(_planned(leaf, examples, method, autograd) for leaf in uses)
    wrong = [leaf for leaf in leaves if leaf.how != "ghost" and math.prod(leaf.shape) >= _LARGE]
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
        PlannedLeaf(path, shape_of(x), "", "autograd", why, examples * bytes_of(x), None)
        for path, x in zip(parameters.paths(), parameters.leaves, strict=True)
    ]
    return Plan(tuple(leaves), examples)


def elements_of(leaf: object) -> int:
    """Return the number of elements of a parameter."""
    return math.prod(shape_of(leaf))


def _width(dtype: str) -> int:
    """Return the bytes of a number of a gradient. Half types are made in their own dtype."""
    return {"float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8, "complex128": 16}.get(dtype, 4)


def _planned(leaf: LeafUses, examples: int, method: str, autograd: Autograd) -> PlannedLeaf:
    """Return how one parameter is measured."""
    width = _width(leaf.dtype)
    made = math.prod(leaf.shape) * width * examples
    uses = ", ".join(f"{use.operation}, T = {use.terms}" for use in leaf.uses[:2]) + (", ..." if leaf.uses[2:] else "")
    terms = max((sum(use.terms for use in part) for part in parts_of(leaf.uses)), default=0)
    why = leaf.reason or ("" if leaf.uses else "not used") or _unproven(leaf.uses)
    if why:
        return PlannedLeaf(leaf.path, leaf.shape, uses, "autograd", why, made, None)
    costs = costs_of(leaf, width, autograd)
    how, why = _chosen(leaf, costs, made, examples, method)
    return PlannedLeaf(leaf.path, leaf.shape, uses, how, why, made, costs.kept * examples, terms)


def _chosen(leaf: LeafUses, costs: Costs, made: int, examples: int, method: str) -> tuple[How, str]:
    """Return how a parameter is measured whose gradients take `made` bytes, and why."""
    if math.prod(leaf.shape) < SMALLEST:
        return "autograd", "small"
    if method == "ghost":
        return "ghost", "asked for"
    if made > _MOST_BYTES and costs.kept * examples < made:
        return "ghost", "saves memory"
    best = min(costs.ghost, costs.product)
    how: How = "ghost" if costs.ghost == best else "product"
    if best > _MARGIN * costs.autograd:
        return "autograd", f"{how} takes {best / costs.autograd:.1f} times the work"
    if (costs.autograd - best) * examples < _WORTH:
        return "autograd", "small"
    return how, f"{costs.autograd / best:.1f} times less work"


def _unproven(uses: Sequence[Use]) -> str:
    for part in parts_of(uses):
        _, rows, columns = part[0].place.shape
        if error_of_square(rows, columns, sum(use.terms for use in part)) is None:
            return "no bound is proven for so many terms"
    return ""
