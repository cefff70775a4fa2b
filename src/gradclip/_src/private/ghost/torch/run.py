"""A forward pass of a batch under `torch.func.vmap`, from inside and outside, and what it keeps of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._C import _functorch
from torch.autograd.graph import get_gradient_edge

from gradclip._src.private.ghost.records import Dense, Embedding, Made, MatrixPlace, PlacedTerms
from gradclip._src.private.ghost.taps import NotInFactorsError
from gradclip._src.private.ghost.torch.layout import ViewLayout

# The documented way, an `autograd.Function` with a `vmap` rule, takes 20 times as long: 168 us an operation against 7.
_NEEDED = (
    "maybe_current_level",
    "maybe_get_level",
    "is_batchedtensor",
    "maybe_get_bdim",
    "get_unwrapped",
    "_add_batch_dim",
)


def available() -> bool:
    """Say whether this PyTorch has what this module needs."""
    hooks = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    return hooks and all(hasattr(_functorch, name) for name in _NEEDED)


def current_level() -> int | None:
    """Return the number of the innermost transform of `torch.func` that is being traced, None outside of all."""
    return _functorch.maybe_current_level()


def is_of_example(x: torch.Tensor, level: int) -> bool:
    """Say whether each example has a tensor of its own."""
    return _functorch.maybe_get_level(x) == level and _functorch.is_batchedtensor(x)


def batch_of(x: torch.Tensor, level: int, count: int) -> torch.Tensor:
    """Return the tensors of all examples, with the batch on axis 0; expanded if they are all the same."""
    if not is_of_example(x, level):
        return x.expand(count, *x.shape)
    axis = _functorch.maybe_get_bdim(x)
    whole = _functorch.get_unwrapped(x)
    return whole if axis == 0 else whole.movedim(axis, 0)


def one_of(batch: torch.Tensor, level: int) -> torch.Tensor:
    """Return the tensor of one example, given those of all with the batch on axis 0."""
    return _functorch._add_batch_dim(batch, 0, level)


def memory_of(x: torch.Tensor) -> int:
    """Return the address of a tensor, or of the tensor of all examples behind it."""
    return (_functorch.get_unwrapped(x) if _functorch.is_batchedtensor(x) else x).data_ptr()


def hooks_are_set() -> bool:
    """Say whether tensors saved for the backward pass go through hooks, as checkpointing uses them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


Labels = tuple[object, ...]

_PIECE = 2**21
"""The bytes of factors that are cut out and multiplied at a time: they stay in a processor's cache."""


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A product, linear in a view of a parameter, as sums over labels: those of the input, the view and the result.

    `inner`: the labels that the input and the view share, in the order of the input's memory; None for the view's.
    """

    given: Labels
    view: Labels
    result: Labels
    inner: Labels | None = None


class Roles(NamedTuple):
    """The axes of the input and of the result in the order blocks, T, and those of the matrix; and how many of each."""

    place: MatrixPlace
    given: tuple[int, ...]
    summed: tuple[int, ...]
    result: tuple[int, ...]
    per_position: int
    swapped: bool

    def positions(self, result: torch.Tensor) -> int:
        """Return the number of positions in the results of all examples."""
        return result.numel() // (max(1, len(result)) * self.per_position)


@lru_cache(maxsize=4096)
def roles_of(product: Product, layout: ViewLayout) -> Roles | None:
    """Return which axes mean what, None if the gradient is not a sum of outer products in a box."""
    given, view, result = product.given, product.view, product.result
    if any(len(set(labels)) < len(labels) for labels in (given, view, result)) or not set(view) <= {*given, *result}:
        return None
    if not set(result) <= {*given, *view}:
        return None
    blocks = [x for x in view if x in given and x in result]
    inner = product.inner or [x for x in view if x not in result]
    outer = [x for x in view if x not in given]
    positions = [x for x in result if x not in view]
    found = layout.place(*(tuple(view.index(x) for x in role) for role in (blocks, inner, outer)))
    if found is None:
        return None
    place, inner_first = found
    kept = [x for x in given if x in view or x in result]
    summed = tuple(i + 1 for i, x in enumerate(given) if x not in kept)
    order = [*blocks, *positions, *inner], [*blocks, *positions, *outer]
    return Roles(
        place,
        (0, *(1 + kept.index(x) for x in order[0])),
        summed,
        (0, *(1 + result.index(x) for x in order[1])),
        place.shape[0] * place.shape[2 if inner_first else 1],
        not inner_first,
    )


def dense(roles: Roles, given: torch.Tensor, cotangent: torch.Tensor, positions: int) -> Dense:
    """Return the factors of shape (batch, blocks, T, rows) and (batch, blocks, T, columns)."""
    if roles.summed:
        given = given.sum(roles.summed)
    inner, outer = _ordered(given, roles.given), _ordered(cotangent, roles.result)
    return paired(roles, inner, outer, len(given), positions)


def paired(roles: Roles, inner: torch.Tensor, outer: torch.Tensor, count: int, positions: int) -> Dense:
    """Return inputs and cotangents, ordered by example, block and position, as factors."""
    blocks, rows, columns = roles.place.shape
    left, right = (outer, inner) if roles.swapped else (inner, outer)
    return Dense(left.reshape(count, blocks, positions, rows), right.reshape(count, blocks, positions, columns))


def _ordered(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return x if axes == tuple(range(len(axes))) else x.permute(axes)


@dataclass(slots=True)
class Term:
    """A use of a parameter in the forward pass. `edge` is where the cotangent of its result appears.

    `finish` turns the cotangents into factors, or into the gradient of each example if `place` is None. `kept` is the
    input, and `version` counts the writes to it, because a changed input gives a wrong gradient. `of_some` returns the
    factors of some examples, given their cotangents and numbers, if factors take much more memory than the input.
    """

    place: MatrixPlace | None
    positions: int
    operation: str
    edge: Any
    finish: Callable[[torch.Tensor], Any]
    kept: torch.Tensor | None = None
    version: int = 0
    embedding: bool = False
    of_some: Callable[[torch.Tensor, slice], Dense] | None = None

    def check(self) -> None:
        """Raise a RuntimeError if the input has been written to since."""
        if self.kept is not None and self.kept._version != self.version:
            raise RuntimeError(
                f"the input of {self.operation} has been modified by an in-place operation, and the gradient needs it. "
                "Replace the in-place operation by one that returns a new tensor."
            )


def parts_of(terms: Sequence[tuple[MatrixPlace, Dense | Embedding]]) -> tuple[list[PlacedTerms], str]:
    """Return the terms by place, and an empty text; or say why they have no disjoint places."""
    by_place: dict[MatrixPlace, list[Dense | Embedding]] = {}
    for place, term in terms:
        by_place.setdefault(place, []).append(term)
    return [PlacedTerms(place, found) for place, found in by_place.items()], overlap(list(by_place))


def nothing_of(batch: torch.Tensor) -> PlacedTerms:
    """Return the part without terms, which stands for a gradient of zeros. `batch` has its shape (batch, ...)."""
    count, *shape = batch.shape
    numel = math.prod(shape)
    place = MatrixPlace((0,) * len(shape), tuple(shape), (numel,), (), (0,), ())
    return PlacedTerms(place, [Dense(batch.new_zeros(count, 1, 0, numel), batch.new_zeros(count, 1, 0, 1))])


def overlap(places: Sequence[MatrixPlace]) -> str:
    """Return an empty text if the places are disjoint, else say what overlaps."""
    for i, one in enumerate(places):
        for other in places[:i]:
            if all(a < d and c < b for a, b, c, d in zip(one.start, one.stop, other.start, other.stop, strict=True)):
                return "uses of parts that overlap, or of the same part as different matrices"
    return ""


def multiplied(term: Term, cotangent: torch.Tensor) -> torch.Tensor | None:
    """Return the matrices of each example in the shape of their box, made piece by piece, in at least float32.

    None if the term does not come in pieces.
    """
    place, of_some = term.place, term.of_some
    if place is None or of_some is None:
        return None
    blocks, rows, columns = place.shape
    of_one = blocks * term.positions * (rows + columns) * cotangent.element_size()
    size = max(1, _PIECE // max(1, of_one))
    wide = torch.promote_types(cotangent.dtype, torch.float32)
    made = cotangent.new_empty((len(cotangent), blocks, rows, columns), dtype=wide)
    for start in range(0, len(cotangent), size):
        piece = slice(start, start + size)
        left, right = (x.to(wide).flatten(0, 1) for x in of_some(cotangent[piece], piece))
        torch.bmm(left.mT, right, out=made[piece].flatten(0, 1))
    return _in_box(made, place)


def _in_box(matrices: torch.Tensor, place: MatrixPlace) -> torch.Tensor:
    """Return matrices of shape (batch, blocks, rows, columns) in the shape of their box."""
    order = [0] * len(place.axes)
    for i, axis in enumerate(place.axes):
        order[axis] = i + 1
    sizes = [place.view[axis] for axis in place.axes]
    return matrices.reshape(-1, *sizes).permute(0, *order).reshape(-1, *place.box)


def materialized(parts: Sequence[PlacedTerms], like: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each example, the sum of all parts. `like` is zeros of its shape (batch, ...)."""
    total = like
    for part in parts:
        place = part.place
        box = total[(slice(None), *(slice(a, b) for a, b in zip(place.start, place.stop, strict=True)))]
        for term in part.terms:
            box += _in_box(_matrices(term, place, like.dtype), place)
    return total


def _matrices(term: Any, place: MatrixPlace, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrices of each example: shape (batch, blocks, rows, columns)."""
    if isinstance(term, Dense):
        return term.left.to(dtype).mT @ term.right.to(dtype)
    _, rows, columns = place.shape
    made = term.right.new_zeros((len(term.right), rows, columns), dtype=dtype)
    index = term.indices[..., None].expand(*term.indices.shape, columns)
    return made.scatter_add_(1, index, term.right.to(dtype))[:, None]


NO_BOX = "a view that is not a box of the parameter, or a sum over its elements"


class Leaf:
    """A parameter during a run. `weight` shares its memory and requires a gradient, which nothing asks for."""

    __slots__ = ("added", "batch", "edge", "reason", "sentinel", "tapped", "terms", "weight")

    def __init__(self, parameter: torch.Tensor, count: int, tapped: bool) -> None:
        self.tapped = tapped
        self.reason, self.added = "", False
        self.terms: list[Term] = []
        self.weight = parameter.detach().requires_grad_()
        self.batch = self.weight.expand(count, *self.weight.shape)
        self.edge: int | None = None
        # A gradient for this tensor reveals a use that no operation reported.
        self.sentinel: torch.Tensor | None = None

    def untap(self, reason: str, *, added: bool = False) -> None:
        """Stop keeping the uses of this parameter. `added`: here it was only added to values of the example."""
        if self.tapped or (self.added and not added):
            self.tapped, self.reason, self.added = False, reason, added

    @property
    def only_added(self) -> bool:
        """Whether all uses of this parameter add it to values of the example."""
        return self.added and all(term.place is None for term in self.terms)


class ForwardPass:
    """A forward pass of a batch of `count` examples at a level of `torch.func`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.level = 0
        self.edges: list[Any] = []
        self.views: dict[tuple[Tap, Any], Any] = {}
        # Whether uses are kept, and whether tensors saved for the backward pass went through hooks.
        self.recording, self.hooked = True, False
        # Whether `torch.func.vmap` and `torch.func.grad` together cannot run an operation that was run.
        self.only_tapped = False
        self.refused = ""

    def refuse(self, reason: str) -> None:
        """Raise a NotInFactorsError, also at the end of the pass: the function may catch this one."""
        self.refused = reason
        raise NotInFactorsError(reason)

    def batch(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all examples, given that of one."""
        return batch_of(x, self.level, self.count)

    def one(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the tensor of one example, given those of all."""
        return one_of(batch, self.level)

    def edge(self, x: torch.Tensor) -> int:
        """Ask for the cotangents of a tensor; return their number."""
        self.edges.append(get_gradient_edge(x))
        return len(self.edges) - 1

    def copies(self, leaf: Leaf) -> torch.Tensor:
        """Return a parameter of one example, of which each example has its own: autograd finds its gradients."""
        if leaf.edge is None and self.recording:
            leaf.edge = self.edge(leaf.batch)
            leaf.terms.append(Term(None, 0, "", leaf.edge, Made))
        return self.one(leaf.batch)


class Tap:
    """A view of a parameter in a run. `parent` is what it is a view of, and how it is made from that."""

    __slots__ = ("layout", "leaf", "own", "parent", "run", "weight")

    def __init__(
        self,
        run: ForwardPass,
        leaf: Leaf,
        layout: ViewLayout,
        weight: torch.Tensor,
        parent: tuple[Tap, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> None:
        self.run, self.leaf, self.layout, self.weight, self.parent = run, leaf, layout, weight, parent
        self.own: torch.Tensor | None = None

    @property
    def inside(self) -> bool:
        """Whether this is the run's own level, not another transform of `torch.func` inside of it."""
        return current_level() == self.run.level

    def copies(self) -> torch.Tensor:
        """Return the view for one example, of which each example has its own."""
        if self.own is not None and self.inside:
            return self.own
        made = self.run.copies(self.leaf) if self.parent is None else self.parent[1](self.parent[0].copies())
        # What another transform makes must not outlive it.
        if self.inside:
            self.own = made
        return made

    def roles(self, product: Product) -> Roles | None:
        """Return what the axes of a product with this view mean; None if it cannot be kept."""
        if not (self.leaf.tapped and self.inside):
            return None
        roles = roles_of(product, self.layout)
        if roles is None:
            self.leaf.untap(NO_BOX)
        return roles

    def keep(self, roles: Roles, given: torch.Tensor, made: torch.Tensor, name: str) -> torch.Tensor:
        """Keep a product of the tensors of all examples; return its result, also for all."""
        made = unviewed(made)
        factor, positions = as_multiplied(given, made), roles.positions(made)
        self.keep_term(roles.place, positions, name, made, given, lambda e: dense(roles, factor, e, positions))
        return made

    def keep_term(
        self,
        place: MatrixPlace,
        positions: int,
        name: str,
        made: torch.Tensor,
        given: torch.Tensor,
        finish: Callable[[torch.Tensor], Any],
        *,
        embedding: bool = False,
        of_some: Callable[[torch.Tensor, slice], Dense] | None = None,
    ) -> None:
        """Keep how the factors follow from the cotangents of `made`, and that the input must not change."""
        if self.run.recording:
            edge, version = self.run.edge(made), given._version
            self.leaf.terms.append(Term(place, positions, name, edge, finish, given, version, embedding, of_some))

    def keep_bias(self, axes: tuple[int, ...], sizes: tuple[int, ...], name: str) -> None:
        """Keep that this was added to the last result that was kept, all along these axes of it; it has these sizes."""
        if not self.run.recording:
            return
        self.leaf.untap(f"bias of {name}", added=True)
        shape = tuple(self.weight.shape)

        def finish(e: torch.Tensor) -> Made:
            e = e.reshape(sizes)
            # A sum over axes of length 1 would be a copy.
            return Made((e if all(sizes[i] == 1 for i in axes) else e.sum(axes)).reshape(sizes[0], *shape))

        self.leaf.terms.append(Term(None, 0, name, len(self.run.edges) - 1, finish))


def as_multiplied(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return the input as it enters the product: under autocast, rounded to the dtype of the result."""
    return (given if given.dtype == made.dtype else given.to(made.dtype)).detach()


def unviewed(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is not a view: an in-place operation on a view would rewrite its history."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x
