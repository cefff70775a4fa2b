"""One forward and one backward pass of a batch, with the gradient of each parameter in factors or made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from gradclip._src.backends.torch.tensors import PLAIN, tensor_of
from gradclip._src.private.batching.verbs import Args, Axes, Function, mapped
from gradclip._src.private.ghost.records import Dense, Embedding, Gradient, Made, MatrixPlace
from gradclip._src.private.ghost.taps import Argnums
from gradclip._src.private.ghost.torch.attention import AttentionAtOnce, own_code
from gradclip._src.private.ghost.torch.checkpoints import Again, same_parameters
from gradclip._src.private.ghost.torch.parameter import TappedParameter, whole
from gradclip._src.private.ghost.torch.run import ForwardPass, Leaf
from gradclip._src.private.ghost.torch.terms import materialized, multiplied, nothing_of, parts_of
from gradclip._src.private.ghost.torch.vmap import current_level
from gradclip._src.tree import FlatTree, flatten

HIDDEN = "an operation that does not report itself"


class BatchedCall:
    """A function of one example, the arguments of a batch, and the parameters among them."""

    def __init__(self, fun: Function, argnums: Argnums, args: Args, axes: Axes) -> None:
        self.fun = fun
        self.positions = argnums if isinstance(argnums, tuple) else (argnums,)
        self.axes = axes
        with torch.inference_mode(False):
            self.args = [mapped(_recordable, arg) for arg in args]
        self.flats: list[FlatTree] = [flatten(self.args[i]) for i in self.positions]
        self.parameters: list[torch.Tensor] = [x for flat in self.flats for x in flat.leaves]
        self._batches = [flatten(arg) for arg, axis in zip(self.args, axes, strict=True) if axis == 0]
        self.count = len(self.batched()[0])

    def paths(self) -> list[str]:
        """Return the path of each parameter, with its argument if there are several."""
        several = len(self.positions) > 1
        pairs = zip(self.positions, self.flats, strict=True)
        return [f"argument {i}{path}" if several else path for i, flat in pairs for path in flat.paths()]

    def refused(self) -> list[str]:
        """Return for each parameter why it cannot be tapped whatever the function does, else an empty text."""
        return [_refused(x) for x in self.parameters]

    def batched(self) -> list[torch.Tensor]:
        """Return the leaves of the arguments that carry the batch."""
        return [x for flat in self._batches for x in flat.leaves]

    def with_leaves(self, batch: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[Any]:
        """Return the arguments with other leaves: those that carry the batch, and the parameters."""
        given, rest = list(self.args), iter(batch)
        for i, flat in zip((i for i, axis in enumerate(self.axes) if axis == 0), self._batches, strict=True):
            given[i] = flat.rebuild(islice(rest, len(flat.leaves)))
        rest = iter(parameters)
        for i, flat in zip(self.positions, self.flats, strict=True):
            given[i] = flat.rebuild(islice(rest, len(flat.leaves)))
        return given


class Pass:
    """A run of a function: the values and aux of all examples, and what the gradients follow from.

    `cotangents` are those that the run asks for. `hidden` are the numbers of the parameters that were used in
    operations that did not report it. A run is `unfinished` if it must start again without the parameters that it
    stopped tapping.
    """

    def __init__(self, call: BatchedCall, tapped: Sequence[bool], copied: Sequence[bool]) -> None:
        self.call = call
        self.run = ForwardPass(call.count)
        self.values: Any = None
        self.aux: Any = None
        self.cotangents: Sequence[torch.Tensor | None] = ()
        self.hidden: list[int] = []
        self.unfinished = False
        with torch.inference_mode(False), torch.enable_grad():
            self.leaves = [Leaf(x, call.count, flag) for x, flag in zip(call.parameters, tapped, strict=True)]
            # Of the others each example gets a copy from the start.
            self.wholes = [None if own else whole(self.run, x) for x, own in zip(self.leaves, copied, strict=True)]
            with same_parameters(self.run), AttentionAtOnce(self.run):
                leaves = torch.func.vmap(self._of_example, randomness="different")(call.batched())
            self.values, self.aux = self._outline.rebuild(leaves)
            if not self.run.hooked:
                self._backward(self.values)

    def _of_example(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves of the value and aux of one example, given those of its batched arguments."""
        run = self.run
        run.level = current_level() or 0
        parameters = [run.copies(leaf) if x is None else x for x, leaf in zip(self.wholes, self.leaves, strict=True)]
        result = self.call.fun(*self.call.with_leaves(batch, parameters))
        if run.hooked:
            # Hooks of saved tensors may run the function again, which needs the transform, and all to be as it was.
            self.unfinished = any(leaf.reason for leaf in self.leaves)
            own = {leaf.weight.data_ptr(): x for leaf, x in zip(self.leaves, parameters, strict=True)}
            with Again(run, own):
                if not self.unfinished:
                    self._backward(run.batch(result[0]))
        # Passed as a list, because `vmap` does not accept None.
        flat = flatten(tuple(result))
        self._outline = flat.outline([None] * len(flat.leaves))
        return [_known(x) for x in flat.leaves]

    def _backward(self, values: object) -> None:
        """Find the cotangents."""
        if not isinstance(values, torch.Tensor) or values.dim() != 1:
            kind, shape = type(values).__name__, tuple(getattr(values, "shape", ()))[1:]
            raise ValueError(f"the loss must return a scalar tensor for each example, got {kind} of shape {shape}.")
        watched = [(i, leaf.sentinel) for i, leaf in enumerate(self.leaves) if leaf.sentinel is not None]
        edges = list(self.run.edges)
        self.cotangents = [None] * len(edges)
        if not values.requires_grad:
            return
        for leaf in self.leaves:
            for term in leaf.terms:
                term.check()
        inputs = [*edges, *(sentinel for _, sentinel in watched)]
        # Modes do not see what runs inside of an operation that hands itself over.
        grads = own_code(torch.autograd.grad)(values, inputs, torch.ones_like(values), allow_unused=True)
        self.cotangents, found = grads[: len(edges)], grads[len(edges) :]
        self.hidden = [i for (i, _), grad in zip(watched, found, strict=True) if grad is not None]

    def close(self) -> None:
        """Let go of what the parameters hold, which a function may have stored somewhere."""
        self.run.views.clear()
        self.run.edges.clear()
        for leaf in self.leaves:
            leaf.terms = []


def gradient_of(leaf: Leaf, cotangents: Sequence[torch.Tensor | None], *, made_soon: bool = False) -> Gradient:
    """Return the gradient of a parameter, given the cotangents that its run asked for.

    `made_soon`: the factors will be multiplied for each example, so they need not all be there together.
    """
    with torch.no_grad():
        if made_soon and (rows := _made_in_pieces(leaf, cotangents)) is not None:
            return Made(rows)
        made: torch.Tensor | None = None
        placed: list[tuple[MatrixPlace, Dense | Embedding]] = []
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
        if not parts:
            return [nothing_of(leaf.batch)] if made is None else Made(made)
        if leaf.tapped:
            return parts
        total = torch.zeros(leaf.batch.shape, dtype=leaf.weight.dtype, device=leaf.weight.device)
        total = materialized(parts, total)
        return Made(total if made is None else total + made)


def _made_in_pieces(leaf: Leaf, cotangents: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the gradient of each example if it is one term that comes in pieces."""
    if not (leaf.tapped and len(leaf.terms) == 1):
        return None
    (term,) = leaf.terms
    cotangent = cotangents[term.edge]
    whole_leaf = term.place is not None and term.place.box == tuple(leaf.weight.shape)
    return multiplied(term, cotangent) if whole_leaf and cotangent is not None else None


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
