"""Which parameters' gradients are never made: what each way costs, the plan of a function, and the table that says why.

Times are in products of a float32 matrix multiplication, for each example. The constants were measured on processors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gradclip._src.core.values import shape_of
from gradclip._src.private.ghost.certificate import error_of_square
from gradclip._src.private.ghost.records import LeafUses, MatrixPlace, Use
from gradclip._src.private.sums.microbatches import bytes_of
from gradclip._src.public import record
from gradclip._src.tree import FlatTree

_PASSES = 70.0
"""What writing an element of a gradient and reading it for its norm and sum costs."""
_WIDE_SUM, _WIDE_GRAM = 2.7, 2.0
"""A product in float64, in a sum and in a Gram matrix."""
_ROW = 8.0
"""Adding an element of an embedding's row to a sum."""


class Autograd(NamedTuple):
    """What a framework's own per-example gradients cost.

    `addition`: adding a product to a gradient that is there, for each element. `convolution`: how many times a product
    of matrices the product of a convolution takes. `alone`: it is fast only where it makes all gradients. `calls`: what
    the operations of factors take in a call, whatever the numbers.
    """

    addition: float
    convolution: float
    alone: bool = False
    calls: float = 0.0


class Costs(NamedTuple):
    """Times of the three ways; infinite for one that is impossible.

    `kept`: the bytes of an example's factors. `rest`: the time that a step takes anyway, forward and backward.
    """

    ghost: float
    product: float
    autograd: float
    kept: int
    rest: float


def costs_of(leaf: LeafUses, width: int, autograd: Autograd) -> Costs:
    """Return the costs for a parameter with uses. Factors have numbers of `width` bytes."""
    made = _PASSES * math.prod(leaf.shape)
    ghost, product, by_autograd, kept = 0.0, made, made, 0
    for part in parts_of(leaf.uses):
        blocks, rows, columns = part[0].place.shape
        dense = sum(use.terms for use in part if not use.embedding)
        embedded = sum(use.terms for use in part if use.embedding)
        gram = dense**2 * (rows + columns) + embedded * (embedded + 2 * dense) * columns
        ghost += blocks * (_WIDE_GRAM * gram + _WIDE_SUM * dense * rows * columns + _ROW * embedded * columns)
        product += math.inf if embedded else blocks * dense * rows * columns
        by_autograd += sum(_by_autograd(use, autograd) for use in part) - autograd.addition * blocks * rows * columns
        kept += width * blocks * (dense * (rows + columns) + embedded * (columns + 1))
    rest = 2.0 * sum(use.terms * math.prod(use.place.shape) for use in leaf.uses if not use.embedding)
    return Costs(ghost, product, by_autograd, kept, rest)


def without_uses(elements: int) -> Costs:
    """Return the costs of a parameter that cannot come in factors."""
    return Costs(math.inf, math.inf, _PASSES * elements, 0, 0.0)


def _by_autograd(use: Use, autograd: Autograd) -> float:
    """Return what autograd takes for a use: its products, and adding them up."""
    blocks, rows, columns = use.place.shape
    times = autograd.convolution if use.operation.startswith("conv") else 1.0
    products = use.terms * (columns if use.embedding else rows * columns * times)
    return blocks * (products + use.additions * autograd.addition * rows * columns)


def parts_of(uses: Sequence[Use]) -> list[list[Use]]:
    """Return the uses of each place."""
    places: dict[MatrixPlace, list[Use]] = {}
    for use in uses:
        places.setdefault(use.place, []).append(use)
    return list(places.values())


SMALLEST = 2**12
"""The elements of a parameter below which its gradients are always made."""
_LARGE = 2**16
"""The elements of a parameter from which method="ghost" insists on factors."""
_WORTH = 2e6
"""What factors must save in a batch, in products, so that their own operations are worth calling."""
_MARGIN = 0.7
"""Factors are kept if they take at most so much of the time: the costs are estimates."""
_PART = 0.1
"""The part of a step's time that factors must save."""
_MOST_BYTES = 2**30
"""The bytes of gradients above which factors are kept if they take fewer, even where they take more time."""

_UNUSED = "not used"
_NEEDED = "the framework makes none of a whole batch"
How = Literal["ghost", "product", "autograd"]


@record
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


@record
@dataclass(frozen=True)
class Plan:
    """How a clipped function measures the gradient of each parameter for a batch. `print` shows it as a table."""

    leaves: tuple[PlannedLeaf, ...]
    examples: int
    program: Hashable = field(default="", repr=False, compare=False)  # equal only for functions that compute the same
    needed: bool = field(default=False, repr=False)  # the framework itself cannot run the function over a batch
    insists: bool = field(default=False, repr=False)  # no other way may be taken

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
        """Whether the batch runs with taps: a gradient comes in factors, or there is no other way."""
        return self.needed or any(self.tapped)

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
    choices = [_chosen(leaf, examples, method, autograd) for leaf in uses]
    if method == "auto":
        choices = _together(choices, examples, autograd)
    for first, (how, why, _) in zip(uses, choices, strict=True):
        fine = how == "ghost" or _elements(first) < _LARGE or why == _UNUSED or first.added
        if method != "ghost" or fine:
            continue
        raise ValueError(
            f"method='ghost' cannot measure {first.path or 'the parameters'} of shape {first.shape} without making its "
            f"gradients: {why}. Pass method='auto' to make those alone, or change that operation."
        )
    leaves = tuple(_described(leaf, one, examples) for leaf, one in zip(uses, choices, strict=True))
    return Plan(leaves, examples, needed=any(leaf.only_tapped for leaf in uses), insists=method == "ghost")


class _Choice(NamedTuple):
    """How a parameter is measured, why, and what each way costs."""

    how: How
    why: str
    costs: Costs


def _together(choices: Sequence[_Choice], examples: int, autograd: Autograd) -> list[_Choice]:
    """Return the choices, given each other: all by autograd if the others save little of a step."""
    tapped = [one for one in choices if one.how != "autograd"]
    step = sum(one.costs.autograd + one.costs.rest for one in choices)
    saved = sum(one.costs.autograd - min(one.costs.ghost, one.costs.product) for one in tapped)
    little = saved < _PART * step or saved * examples < autograd.calls
    if little and not {"saves memory", _NEEDED} & {one.why for one in tapped}:
        return [one._replace(how="autograd", why="saves little of a step") if one in tapped else one for one in choices]
    if not (tapped and autograd.alone):
        return list(choices)

    def beside(one: _Choice) -> _Choice:
        cheaper = one.costs.product < one.costs.autograd or (one.why != "small" and one.costs.product < math.inf)
        multiply = one.how == "autograd" and cheaper
        return one._replace(how="product", why="others come in factors") if multiply else one

    return list(map(beside, choices))


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


def _described(leaf: LeafUses, choice: _Choice, examples: int) -> PlannedLeaf:
    """Return a row of a plan."""
    uses = ", ".join(f"{use.operation}, T = {use.terms}" for use in leaf.uses[:2]) + (", ..." if leaf.uses[2:] else "")
    terms = max((sum(use.terms for use in part) for part in parts_of(leaf.uses)), default=0)
    made = _elements(leaf) * _width(leaf.dtype) * examples
    kept = choice.costs.kept * examples if choice.costs.kept else None
    return PlannedLeaf(leaf.path, leaf.shape, uses, choice.how, choice.why, made, kept, terms)


def _elements(leaf: LeafUses) -> int:
    return math.prod(leaf.shape)


def _chosen(leaf: LeafUses, examples: int, method: str, autograd: Autograd) -> _Choice:
    """Return how a parameter is measured, if it were the only one."""
    why = leaf.reason or ("" if leaf.uses else _UNUSED) or _unproven(leaf.uses)
    costs = without_uses(_elements(leaf)) if why else costs_of(leaf, _width(leaf.dtype), autograd)
    made = _elements(leaf) * _width(leaf.dtype) * examples
    best = min(costs.ghost, costs.product)
    how: How = "ghost" if costs.ghost == best else "product"
    if leaf.only_tapped and not why:
        why = _NEEDED
    elif why or _elements(leaf) < SMALLEST:
        how, why = "autograd", why or "small"
    elif method == "ghost":
        how, why = "ghost", "asked for"
    elif made > _MOST_BYTES and costs.kept * examples < made:
        how, why = "ghost", "saves memory"
    elif best > _MARGIN * costs.autograd:
        how, why = "autograd", f"{how} takes {best / costs.autograd:.1f} times the work"
    elif (costs.autograd - best) * examples < _WORTH:
        how, why = "autograd", "small"
    else:
        why = f"{costs.autograd / best:.1f} times less work"
    return _Choice(how, why, costs)


def _unproven(uses: Sequence[Use]) -> str:
    parts = parts_of(uses)
    matrices = sum(part[0].place.shape[0] for part in parts)
    for part in parts:
        _, rows, columns = part[0].place.shape
        if error_of_square(rows, columns, sum(use.terms for use in part), matrices) is None:
            return "no bound is proven for so many terms"
    return ""
