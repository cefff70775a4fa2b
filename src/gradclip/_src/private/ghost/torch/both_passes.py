"""One forward and one backward pass of a batch, with the gradient of each parameter in factors or made.

Checkpointing: modules are run again in the backward pass, with the parameters of the forward pass. By then
`functional_call` has put the module's own parameters back. They stand in the same memory as the ones passed,
or else an error is raised, and are replaced by these. The operations are then the same as in the forward pass.

Attention: its own code, whose operations report themselves, and one call for a whole batch.
`torch.func.vmap` calls `scaled_dot_product_attention` for one example after another on some devices. As it treats the
examples of a batch alone anyway, one call does for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import _functorch
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from gradclip._src.backends.torch.tensors import PLAIN, tensor_of
from gradclip._src.private.batching.torch import over_examples, recordable, same_parameters
from gradclip._src.private.batching.verbs import Args, Axes, Function, mapped
from gradclip._src.private.ghost.records import Dense, Embedding, Gradient, Made, MatrixPlace
from gradclip._src.private.ghost.taps import Argnums
from gradclip._src.private.ghost.torch.parameter import (
    UNKNOWN,
    Arguments,
    Keywords,
    Operation,
    TappedParameter,
    embedding,
    replaced,
    tapped,
    whole,
    with_copies,
)
from gradclip._src.private.ghost.torch.run import (
    ForwardPass,
    Leaf,
    current_level,
    hooks_are_set,
    is_of_example,
    materialized,
    memory_of,
    multiplied,
    nothing_of,
    parts_of,
)
from gradclip._src.tree import FlatTree, flatten


class Again(TorchFunctionMode):
    """Within it, parameters are replaced by those in `given` that share their memory, and no use of them is kept."""

    def __init__(self, run: ForwardPass, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.run, self.given = run, given

    def __enter__(self) -> Again:
        self.run.recording = False
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.run.recording = True
        super().__exit__(*error)

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        return func(*self._with_given(tuple(args)), **self._with_given(kwargs or {}))

    def _with_given(self, x: object) -> Any:
        return replaced(x, lambda own: self.given.get(own.data_ptr(), own), torch.nn.Parameter)


def _again(run: ForwardPass) -> Callable[[torch.nn.Module], bool | None]:
    """Return what says for `same_parameters` whether a module is run again. It refuses those with backward hooks."""
    thread = threading.get_ident()

    def again(module: torch.nn.Module) -> bool | None:
        if threading.get_ident() != thread:
            return None
        if any((*_OF_ALL_MODULES, module._backward_hooks, module._backward_pre_hooks)):
            run.refuse(f"{type(module).__name__} has a backward hook")
        return not run.recording if hooks_are_set() or not run.recording else None

    return again


def _memory(x: torch.Tensor) -> int:
    # Otherwise `Again` would replace parameters here as well.
    with torch._C.DisableTorchFunction():
        return memory_of(x.tap.weight if type(x) is TappedParameter else x)


@lru_cache
def own_code(func: FunctionType) -> Operation:
    """Return a function that does not hand itself over: the same code, which finds no tensor of a special kind.

    So its operations report themselves one by one.
    """
    hands_over = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(hands_over, lambda *tensors: False)}
    made = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


_OF_ALL_MODULES = (modules._global_backward_hooks, modules._global_backward_pre_hooks)
_HOOKING = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad}
_GRAD_FN, _REQUIRES_GRAD = (getattr(torch.Tensor, name).__get__ for name in ("grad_fn", "requires_grad"))


class AttentionAtOnce(TorchFunctionMode):
    """Within it, `scaled_dot_product_attention` of one example is computed for the whole batch.

    Hooks on gradients are refused: tensors of one example are not in the graph, so nothing would call them.
    """

    def __init__(self, run: ForwardPass) -> None:
        super().__init__()
        self.run = run

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.run.refused:
            self.run.refuse(self.run.refused)

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if hooks_are_set():
            self.run.hooked = True
        if func in _HOOKING:
            self.run.refuse(f"Tensor.{func.__name__} is called")
        if func in (_GRAD_FN, _REQUIRES_GRAD) and is_of_example(args[0], self.run.level):
            if func == _GRAD_FN:
                self.run.refuse("the grad_fn of a tensor is read, which may get hooks")
            return _functorch.get_unwrapped(args[0]).requires_grad
        # That a value of the example gets a gradient too changes none of the parameters'. `vmap` refuses to be asked.
        asks = func is torch.Tensor.requires_grad_ and all((*args[1:], *kwargs.values()))
        if asks and is_of_example(args[0], self.run.level):
            return args[0]
        if func in (F.embedding, torch.embedding) and not any(map(tapped, (*args, *kwargs.values()))):
            return embedding(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return own_code(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention and current_level() == self.run.level:
            args, kwargs = with_copies(func, args, kwargs)
            made = self._attention(*args, **kwargs)
            if made is not UNKNOWN:
                return made
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        tensors = [query, key, value]
        masks = [] if attn_mask is None else [attn_mask]
        # Dropout must be drawn for each example.
        if dropout_p or {type(x) for x in (*tensors, *masks)} != {torch.Tensor}:
            return UNKNOWN
        if {x.dim() for x in tensors} not in ({3}, {4}) or any(x.dim() > query.dim() for x in masks):
            return UNKNOWN
        masks = [self._spread(x, query.shape[:-3]) for x in masks]
        # The fast kernels want four axes.
        q, k, v = (self.run.batch(x).flatten(0, -4) for x in tensors)
        mask = masks[0] if masks else None
        made = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return self.run.one(made.reshape(self.run.count, *query.shape[:-3], *made.shape[1:]))

    def _spread(self, mask: torch.Tensor, outer: Sequence[int]) -> torch.Tensor:
        """Return the mask of all examples with four axes."""
        batch = self.run.batch(mask)
        batch = batch.reshape(self.run.count, *(1,) * (len(outer) + 3 - mask.dim()), *mask.shape)
        return batch.expand(self.run.count, *outer, *batch.shape[-3:]).flatten(0, -4)


HIDDEN = "an operation that does not report itself"


class BatchedCall:
    """A function of one example, the arguments of a batch, and the parameters among them."""

    def __init__(self, fun: Function, argnums: Argnums, args: Args, axes: Axes) -> None:
        self.fun = fun
        self.positions = argnums if isinstance(argnums, tuple) else (argnums,)
        self.axes = axes
        with torch.inference_mode(False):
            self.args = [mapped(recordable, arg) for arg in args]
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
            with same_parameters(_again(self.run), _memory), AttentionAtOnce(self.run):
                leaves = over_examples(self._of_example, call.batched())
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


def _known(x: object) -> torch.Tensor:
    return x.tap.weight.detach() if type(x) is TappedParameter else tensor_of(x)
