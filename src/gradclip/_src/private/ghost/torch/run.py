"""A forward pass of a batch under `torch.func.vmap`, and what it keeps of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradclip._src.private.ghost.records import Dense, Made, MatrixPlace
from gradclip._src.private.ghost.torch.layout import ViewLayout
from gradclip._src.private.ghost.torch.terms import Product, Roles, Term, dense, roles_of
from gradclip._src.private.ghost.torch.vmap import batch_of, current_level, one_of

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
