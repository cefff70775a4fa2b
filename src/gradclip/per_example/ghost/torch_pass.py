"""One forward and one backward pass of a batch, with the gradient of each parameter in factors or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from gradclip.backends.torch.tensors import PLAIN, tensor_of
from gradclip.per_example.batching.verbs import Args, Axes, Function, mapped
from gradclip.per_example.ghost.records import Dense, Gradient, Made, Place, Rows
from gradclip.per_example.ghost.taps import Argnums
from gradclip.per_example.ghost.torch_attention import AttentionAtOnce
from gradclip.per_example.ghost.torch_parameter import TappedParameter, whole
from gradclip.per_example.ghost.torch_run import Leaf, Run
from gradclip.per_example.ghost.torch_terms import materialized, parts_of
from gradclip.per_example.ghost.torch_vmap import current_level
from gradclip.tree import FlatTree, flatten

HIDDEN = "an operation that does not report itself, such as an autograd.Function"
NO_HOOKS = "checkpointing, or another use of hooks of saved tensors, would run outside of torch.func.vmap"


class Call:
    """A function of one example, the arguments of a batch, and the parameters among them."""

    def __init__(self, fun: Function, argnums: Argnums, args: Args, axes: Axes) -> None:
        self.fun = fun
        self.positions = argnums if isinstance(argnums, tuple) else (argnums,)
        self.axes = axes
        self.args = [mapped(_recordable, arg) for arg in args]
        self.flats: list[FlatTree] = [flatten(self.args[i]) for i in self.positions]
        self.parameters: list[torch.Tensor] = [x for flat in self.flats for x in flat.leaves]
        rows = [x for arg, axis in zip(self.args, axes, strict=True) if axis == 0 for x in flatten(arg).leaves]
        self.count = len(rows[0])

    def paths(self) -> list[str]:
        """Return the path of each parameter, with its argument if there are several."""
        several = len(self.positions) > 1
        pairs = zip(self.positions, self.flats, strict=True)
        return [f"argument {i}{path}" if several else path for i, flat in pairs for path in flat.paths()]

    def refused(self) -> list[str]:
        """Return for each parameter why it cannot be tapped whatever the function does, else an empty text."""
        return [_refused(x) for x in self.parameters]

    def forward(self, tapped: Sequence[bool], copied: Sequence[bool]) -> Pass:
        """Run the function. Of parameters whose flag in `copied` is True each example gets a copy from the start."""
        with torch.inference_mode(False), torch.enable_grad():
            run = Run(self.count)
            leaves = [Leaf(x, self.count, flag) for x, flag in zip(self.parameters, tapped, strict=True)]
            wholes = [None if own else whole(run, leaf) for leaf, own in zip(leaves, copied, strict=True)]
            flats = [flatten(x) if axis == 0 else None for x, axis in zip(self.args, self.axes, strict=True)]

            def of_leaves(batch: Sequence[torch.Tensor]) -> Any:
                run.level = current_level() or 0
                rest = iter(batch)
                given = [
                    arg if flat is None else flat.rebuild(islice(rest, len(flat.leaves)))
                    for arg, flat in zip(self.args, flats, strict=True)
                ]
                parameters = iter(
                    [run.copies(leaf) if x is None else x for x, leaf in zip(wholes, leaves, strict=True)]
                )
                for i, flat in zip(self.positions, self.flats, strict=True):
                    given[i] = flat.rebuild(islice(parameters, len(flat.leaves)))
                return mapped(_known, self.fun(*given))

            batch = [x for flat in flats if flat is not None for x in flat.leaves]
            with torch.autograd.graph.disable_saved_tensors_hooks(NO_HOOKS), AttentionAtOnce(run):
                values, aux = torch.func.vmap(of_leaves, randomness="different")(batch)
        return Pass(run, leaves, values, aux)


@dataclass
class Pass:
    """A forward pass that is done. `values` have the graph."""

    run: Run
    leaves: list[Leaf]
    values: Any
    aux: Any

    def backward(self) -> tuple[list[torch.Tensor | None], list[int]]:
        """Return the cotangents that the run asks for, and the parameters used in operations that did not report it."""
        values, edges = self.values, self.run.edges
        if not isinstance(values, torch.Tensor) or values.dim() != 1:
            kind, shape = type(values).__name__, tuple(getattr(values, "shape", ()))[1:]
            raise ValueError(f"the loss must return a scalar tensor for each example, got {kind} of shape {shape}.")
        watched = [(i, leaf.sentinel) for i, leaf in enumerate(self.leaves) if leaf.sentinel is not None]
        if not values.requires_grad:
            return [None] * len(edges), []
        for leaf in self.leaves:
            for term in leaf.terms:
                term.check()
        inputs = [*edges, *(sentinel for _, sentinel in watched)]
        grads = torch.autograd.grad(values, inputs, torch.ones_like(values), allow_unused=True)
        found = grads[len(edges) :]
        return list(grads[: len(edges)]), [i for (i, _), grad in zip(watched, found, strict=True) if grad is not None]

    def close(self) -> None:
        """Let go of what the parameters hold, which a function may have stored somewhere."""
        self.run.views.clear()
        self.run.edges.clear()
        for leaf in self.leaves:
            leaf.terms = []


def gradient_of(leaf: Leaf, cotangents: Sequence[torch.Tensor | None]) -> Gradient:
    """Return the gradient of a parameter, given the cotangents that its run asked for."""
    with torch.no_grad():
        made: torch.Tensor | None = None
        placed: list[tuple[Place, Dense | Rows]] = []
        for term in leaf.terms:
            cotangent = cotangents[term.edge]
            if cotangent is None:
                continue
            found = term.finish(cotangent)
            if term.place is not None:
                placed.append((term.place, found))
            else:
                rows = found.rows.to(leaf.weight.dtype)
                made = rows if made is None else made + rows
        parts, overlapping = parts_of(placed)
        if overlapping:
            leaf.untap(overlapping)
        if leaf.tapped:
            return parts
        if not parts and made is not None:
            return Made(made)
        total = torch.zeros(leaf.batch.shape, dtype=leaf.weight.dtype, device=leaf.weight.device)
        total = materialized(parts, total)
        return Made(total if made is None else total + made)


def _refused(x: object) -> str:
    if type(x) not in PLAIN:
        return f"a parameter of type {type(x).__name__}"
    if not x.is_floating_point():  # type: ignore[attr-defined]
        return f"a parameter of dtype {str(x.dtype).removeprefix('torch.')}"  # type: ignore[attr-defined]
    return "" if x.layout is torch.strided else "a sparse parameter"  # type: ignore[attr-defined]


def _recordable(x: object) -> Any:
    """Return a leaf of an argument; a tensor made in inference mode is copied, because autograd refuses it."""
    return x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x


def _known(x: object) -> torch.Tensor:
    return x.tap.weight.detach() if type(x) is TappedParameter else tensor_of(x)
