"""Functions of one example over a batch, for PyTorch: `torch.func.vmap` or a loop, and microbatches one after another.

Each example draws its own random numbers, for dropout for example.

Gradients of one example at a time with ordinary autograd, and what a single example reveals about a loss.
Recurrent layers, checkpointing, `.item()`, in-place writes to buffers and sparse gradients work as in a training step.
Each parameter becomes a new leaf of the graph that shares the parameter's memory. Checkpointing recomputes with the
module's own parameters. If these are the parameters passed, it finds the same numbers.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from gradclip._src.backends.torch.framework import visible
from gradclip._src.backends.torch.tensors import tensor_of
from gradclip._src.private.batching.masks import masks_unread
from gradclip._src.private.batching.verbs import (
    Args,
    Axes,
    Batching,
    Function,
    NoLossError,
    Step,
    Transform,
    mapped,
    mapped_args,
    transformed,
)
from gradclip._src.tree import FlatTree, flatten


class TorchBatching(Batching):
    """`Batching` for PyTorch."""

    modules_called = (
        "torch.func.functional_call(model, parameters, (x,)) does under the names of model.named_parameters()"
    )

    def with_gradient(self, fun: Function, argnums: int | tuple[int, ...], transform: Transform | None) -> Function:
        if torch.compiler.is_compiling():
            return transformed(torch.func.grad_and_value(fun, argnums, has_aux=True), transform)
        return TorchGradient(fun, argnums, transform)

    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        def call(*args: object) -> Any:
            listed = TensorsOf()
            # Passed as one list, because `vmap` does not accept None inside or in place of a batched argument.
            flats = [None if axis is None else flatten(arg) for axis, arg in zip(axes, args, strict=True)]

            def of_leaves(leaves: Sequence[torch.Tensor]) -> Any:
                rest = iter(leaves)
                trees = [None if flat is None else flat.rebuild(islice(rest, len(flat.leaves))) for flat in flats]
                given = zip(flats, trees, args, strict=True)
                made = fun(*[arg if flat is None else tree for flat, tree, arg in given])
                return made if torch.compiler.is_compiling() else listed(made)

            # Gradients are computed inside the function. A graph around `vmap` would only hold memory.
            with torch.no_grad():
                leaves = [leaf for flat in flats if flat is not None for leaf in flat.leaves]
                made = over_examples(of_leaves, leaves)
            return made if torch.compiler.is_compiling() else listed.back(made)

        def watched(*args: object) -> Any:
            with nullcontext() if torch.compiler.is_compiling() else batch_norm_named():
                try:
                    return call(*args)
                except Exception as error:
                    better = error if torch.compiler.is_compiling() else explained(error, fun, args, axes)
                    if better is error:
                        raise
                    raise better from error

        return watched

    def unused(self, fun: Function, args: Args, axes: Axes, summed: object) -> list[str]:
        leaves = flatten(summed).leaves
        if not isinstance(fun, TorchGradient) or not set(map(type, leaves)) <= {torch.Tensor} or not visible(leaves):
            return []
        # The usual and cheap case: no gradient is all zeros, so every parameter is used.
        if all(leaf.any() for leaf in leaves):
            return []
        try:
            # The check must not change the caller's random numbers or repeat warnings of the call itself.
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return fun.unused(example(args, axes, 0))
        except Exception:  # if autograd fails, nothing is known about usage
            return []

    def keys(self, key: object, count: int) -> Any:
        raise ValueError(
            "prng_argnum is for JAX, where random numbers come from keys. Leave it out in PyTorch: each example draws "
            "its own random numbers from the global generator. To seed it, call torch.manual_seed."
        )

    def flags(self, mask: object) -> torch.Tensor:
        return tensor_of(mask).to(torch.bool)

    def blanked(self, tree: object, mask: torch.Tensor) -> Any:
        def rows(x: torch.Tensor) -> torch.Tensor:
            here = mask.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
            return torch.where(here, x, torch.zeros_like(x))

        return mapped(rows, tree)

    def padded(
        self, args: Args, axes: Axes, mask: torch.Tensor | None, count: int, size: int
    ) -> tuple[tuple[Any, ...], torch.Tensor]:
        real = torch.ones(count, dtype=torch.bool, device="cpu") if mask is None else mask
        flags = torch.cat([real, real.new_zeros(size - count)])
        return tuple(mapped_args(lambda x: _filled_up(x, size), args, axes)), flags

    def in_microbatches(
        self, step: Step, args: Args, axes: Axes, mask: torch.Tensor | None, count: int, size: int
    ) -> tuple[Any, Any]:
        # After the last example that counts there is only padding, so those microbatches are skipped.
        end = _end_of(mask, count)
        sums, pieces = None, []
        for start in range(0, max(1, end), size):
            rows = slice(start, start + size)
            here = mapped_args(partial(_rows, rows=rows), args, axes)
            some = None if mask is None else mask[rows]
            summed, outputs = step(*self.padded(here, axes, some, min(size, count - start), size))
            sums = summed if sums is None else mapped(torch.add, sums, summed)
            pieces.append(outputs)
        return sums, mapped(lambda *parts: _joined(parts, count), *pieces)


class TorchLoop(TorchBatching):
    """`Batching` with a loop over the examples, for functions that `torch.func.vmap` cannot handle."""

    def with_gradient(self, fun: Function, argnums: int | tuple[int, ...], transform: Transform | None) -> Function:
        return TorchGradient(fun, argnums, transform)

    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        def call(*args: object) -> Any:
            batches = [flatten(arg).leaves for axis, arg in zip(axes, args, strict=True) if axis is not None]
            count = len(next(leaf for leaves in batches for leaf in leaves))
            with batch_norm_named():
                rows = [alone(fun, *example(args, axes, i)) for i in range(count)]
            return mapped(lambda *parts: torch.stack(parts), *rows)

        # `torch.compile` does not trace ordinary autograd.
        return torch.compiler.disable(call) if torch.compiler.is_compiling() else call


def check_hooks(parameters: FlatTree) -> None:
    """Raise a ValueError for a parameter with hooks."""
    if not torch.compiler.is_compiling():
        _refuse_hooks(parameters)
    elif any(getattr(x, "requires_grad", False) for x in parameters.leaves):
        # Traced tensors show no hooks, and these may come and go between calls.
        torch.compiler.disable(_refuse_hooks)(parameters)


def _refuse_hooks(parameters: FlatTree) -> None:
    for i, x in enumerate(parameters.leaves):
        kinds = (getattr(x, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        if not all(getattr(hook, "only_watches", False) for hooks in kinds for hook in hooks.values()):
            raise ValueError(
                f"the parameter {parameters.paths()[i] or 'passed'} has a hook, which no call would run. Remove it, or "
                "pass parameter.detach(), which has none. To change each gradient, pass pre_clipping_transform=."
            )


def _rows(x: object, rows: slice) -> torch.Tensor:
    return tensor_of(x)[rows]


def _filled_up(x: object, size: int) -> torch.Tensor:
    """Return a copy, padded to `size` rows with the last row, or with zeros if there is none."""
    # BLAS picks its order of additions by shape, strides and alignment, so these must not depend on `x`.
    given = tensor_of(x)
    count = given.shape[0]
    full = given.new_empty((size, *given.shape[1:]))
    full[:count] = given
    full[count:] = given[-1:] if count else 0
    return full


def _end_of(mask: torch.Tensor | None, count: int) -> int:
    """Return the number of examples up to the last one that counts, or `count` if reading the mask would wait."""
    if mask is None or not mask.is_cpu or torch.compiler.is_compiling():
        return count
    return int(mask.nonzero().max()) + 1 if mask.any() else 0


def _joined(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Concatenate the parts and pad with zeros to `count` rows."""
    missing = max(0, count - sum(part.shape[0] for part in parts))
    if len(parts) == 1 and not missing:
        return parts[0]
    return torch.cat([*parts, parts[0].new_zeros((missing, *parts[0].shape[1:]))])


class TensorsOf:
    """Turns a tree into the list of tensors that `torch.func` can return, and back: None is no tensor, a number is."""

    def __init__(self) -> None:
        self._flat: FlatTree | None = None

    def __call__(self, tree: object) -> list[torch.Tensor]:
        """Return the leaves of a tree."""
        self._flat = flatten(tree)
        return list(map(tensor_of, self._flat.leaves))

    def back(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Return leaves in the tree of the last call."""
        assert self._flat is not None
        return self._flat.rebuild(leaves)


class TorchGradient:
    """Turns `fun`, which returns `(value, aux)`, into a function that returns `(transform(gradient), (value, aux))`."""

    def __init__(
        self, fun: Function, argnums: int | tuple[int, ...], transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.fun = fun
        self.transform = transform
        self.positions = argnums if isinstance(argnums, tuple) else (argnums,)
        self.single = not isinstance(argnums, tuple)
        self.traced = transformed(self._with_any_aux(argnums), transform)

    def __call__(self, *args: object) -> Any:
        """Return the gradient computed by `torch.func`."""
        return self.traced(*args)

    def _with_any_aux(self, argnums: int | tuple[int, ...]) -> Function:
        """Return a function of the gradient by `torch.func`, which takes tensors only, and the value with its aux."""

        def call(*args: object) -> Any:
            listed = TensorsOf()

            def fun(*given: object) -> tuple[Any, list[torch.Tensor]]:
                value, aux = self.fun(*given)
                return value, listed(aux)

            gradient, (value, leaves) = torch.func.grad_and_value(fun, argnums, has_aux=True)(*args)
            return gradient, (value, listed.back(leaves))

        return call

    def alone(self, *args: object) -> Any:
        """Return the gradient computed by autograd, with zeros for parameters that the value does not depend on."""
        flats, grads, kept = self._by_autograd(args)
        dense = [
            # Sparse gradients of different examples cannot be stacked.
            torch.zeros_like(x) if grad is None else grad.to_dense() if grad.is_sparse else grad
            for x, grad in zip((x for flat in flats for x in flat.leaves), grads, strict=True)
        ]
        trees, rest = [], iter(dense)
        for flat in flats:
            trees.append(flat.rebuild([next(rest) for _ in flat.leaves]))
        gradient = trees[0] if self.single else tuple(trees)
        return gradient if self.transform is None else mapped(_detached, self.transform(gradient)), kept

    def unused(self, args: Args) -> list[str]:
        """Return the paths of the parameters that the value does not depend on, each with its argument."""
        flats, grads, _ = self._by_autograd(args)
        paths = [f"argument {i}{path}" for i, flat in zip(self.positions, flats, strict=True) for path in flat.paths()]
        return [path for path, grad in zip(paths, grads, strict=True) if grad is None]

    def count(self, args: Args) -> int:
        """Return the number of parameters."""
        return sum(len(flatten(args[i]).leaves) for i in self.positions)

    def _by_autograd(self, args: Args) -> tuple[list[FlatTree], Sequence[torch.Tensor | None], Any]:
        # Autograd records nothing in inference mode, not even if gradients are enabled.
        backward = _BackwardPass()
        with torch.inference_mode(False), torch.enable_grad(), same_parameters(backward.again, _address):
            given = [mapped(recordable, arg) for arg in args]
            flats = [flatten(given[i]) for i in self.positions]
            # New leaves that share the parameters' memory, so that the graph of one example ends here.
            leaves = [[x.detach().requires_grad_() for x in flat.leaves] for flat in flats]
            for i, flat, own in zip(self.positions, flats, leaves, strict=True):
                given[i] = flat.rebuild(own)
            value, aux = self.fun(*given)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(backward.begins)
            grads = _gradients(value, [x for own in leaves for x in own])
        return flats, grads, mapped(_detached, (value, aux))


def recordable(x: Any) -> Any:
    """Return a leaf of an argument; a tensor made in inference mode is copied, because autograd refuses it."""
    return x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x


def _gradients(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Return the gradients of a loss, with None for leaves that it does not depend on."""
    if not isinstance(value, torch.Tensor):
        raise NoLossError(
            f"a {type(value).__name__}, which has no gradient. Return the tensor, without .item(), float() or .numpy()."
        )
    # Autograd raises an error for a value without a graph, that is, one that depends on no parameter.
    return torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)


@contextmanager
def same_parameters(
    again: Callable[[torch.nn.Module], bool | None], memory: Callable[[torch.Tensor], int]
) -> Iterator[None]:
    """Raise a RuntimeError if a module is run again in the backward pass with parameters of other memory.

    Checkpointing does this after `functional_call` has restored the module's own parameters. The gradients would then
    belong to neither set of parameters. `again` says whether a module is run again, or None for another thread's.
    Hooks are global: another thread may be running another model.
    """
    used: dict[torch.nn.Module, list[int]] = {}

    def look(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        second = again(module)
        if second is None:
            return
        if not torch.is_grad_enabled() and _inside(CheckpointFunction.forward):
            raise ReentrantError
        found = [memory(x) for x in module._parameters.values() if x is not None]
        if second and used.get(module, found) != found:
            raise RuntimeError(
                f"checkpointing computes {type(module).__name__} again with the module's own parameters, which are not "
                "the parameters passed. Pass dict(model.named_parameters()), or load yours into the model first."
            )
        used[module] = found

    with register_module_forward_pre_hook(look):
        yield


class _BackwardPass:
    """Which backward pass follows a run of a function, if it has begun. A device's has a thread of its own."""

    def __init__(self) -> None:
        self.thread, self.number = threading.get_ident(), -1

    def begins(self, gradient: torch.Tensor) -> None:
        """Note the number of the backward pass that this thread works on."""
        self.number = torch._C._current_graph_task_id()

    def again(self, module: torch.nn.Module) -> bool | None:
        """Say whether this thread works on the backward pass, None if it has no part in the run."""
        if self.number == -1:
            return False if threading.get_ident() == self.thread else None
        return True if torch._C._current_graph_task_id() == self.number else None


def _address(x: torch.Tensor) -> int:
    # `detach` makes new tensors that share memory, and those count as the same parameters.
    return x.data_ptr() if type(x) in (torch.Tensor, torch.nn.Parameter) else 0


class ReentrantError(RuntimeError):
    """A function checkpoints in a way in which only `.backward()` finds the gradients of what is inside."""

    def __init__(self) -> None:
        super().__init__(
            "checkpointing with use_reentrant=True loses gradients here. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint, or to a model of transformers gradient_checkpointing_kwargs="
            "{'use_reentrant': False} of gradient_checkpointing_enable, or call gradient_checkpointing_disable()."
        )


def _inside(function: FunctionType) -> bool:
    """Say whether a function is being called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def alone(fun: Function, *args: object) -> Any:
    """Return a function's result for one example, outside of `vmap`."""
    return fun.alone(*args) if isinstance(fun, TorchGradient) else mapped(_detached, fun(*args))


def example(args: Args, axes: Axes, index: int) -> list[Any]:
    """Return the arguments with a copy of one row of each argument that carries the batch."""
    return [
        arg if axis is None else mapped(lambda x: _copied(tensor_of(x)[index]), arg)
        for arg, axis in zip(args, axes, strict=True)
    ]


def _copied(row: torch.Tensor) -> torch.Tensor:
    # BLAS picks its order of additions by strides and alignment. Those of a view depend on its place in the batch.
    return row.clone(memory_format=torch.contiguous_format) if row.layout is torch.strided else row.clone()


def _detached(x: object) -> torch.Tensor:
    return tensor_of(x).detach()


def explained(error: Exception, fun: Function, args: Args, axes: Axes) -> Exception:
    """Return a helpful error if `vmap` fails on a function that works for one example, else the error itself."""
    try:
        one = example(args, axes, 0)
        # The trial must not change the caller's random numbers.
        with torch.random.fork_rng(devices=[]):
            depends = not isinstance(fun, TorchGradient) or len(fun.unused(one)) < fun.count(one)
            tried = depends and (not isinstance(fun, TorchGradient) or fun.transform is not None)
            if tried and alone(fun, *one) is None:
                return error
    except (NoLossError, ReentrantError) as wrong:
        return wrong
    except Exception:
        return error
    failed = f"torch.func.vmap cannot run this function on a batch ({str(error).strip().partition(chr(10))[0][:200]})."
    if not depends:
        return RuntimeError(
            f"{failed} For one example it runs, but its loss depends on no parameter: return the loss without .item(), "
            ".detach() or torch.tensor(...), and compute it with the parameters that are passed, by "
            "torch.func.functional_call(model, parameters, (x,))."
        )
    return RuntimeError(
        f"{failed} For one example it works: pass "
        'method="loop" to process one example at a time. .item(), branches on values, in-place writes to buffers, '
        "sparse gradients and backward hooks of modules need it. Recurrent layers and checkpointing also work with "
        'method="auto" or "ghost", unless a setting or a hook needs gradients. For a model of transformers, '
        "gradient_checkpointing_disable() with disable_input_require_grads() may do, or "
        'attn_implementation="eager" when it is made.'
    )


def over_examples(fun: Function, leaves: Sequence[torch.Tensor]) -> Any:
    """Return what a function makes of each example. Each draws its own random numbers."""
    library = None if torch.compiler.is_compiling() else sys.modules.get("transformers.utils.import_utils")
    with nullcontext() if library is None else masks_unread(library):
        return torch.func.vmap(fun, randomness="different")(leaves)


@contextmanager
def batch_norm_named() -> Iterator[None]:
    """Raise a RuntimeError if BatchNorm is about to update its statistics. Warn if it sees a single example."""
    thread = threading.get_ident()

    def look(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        # Hooks are global: another thread may be running another model.
        if not isinstance(module, _BatchNorm) or threading.get_ident() != thread:
            return
        name = type(module).__name__
        if module.training and module.running_mean is not None:
            raise RuntimeError(
                f"{name} in training mode mixes the examples of a batch, so no example has its own gradient. It also "
                "stores statistics of the examples without noise. Replace it with torch.nn.GroupNorm, or call .eval() "
                "on it to use its stored statistics."
            )
        if module.running_mean is None and inputs and inputs[0].shape[0] == 1:
            warnings.warn(
                f"{name} with track_running_stats=False normalises each example alone here. That is a different "
                "network from one trained on batches. Use torch.nn.GroupNorm to make this explicit.",
                UserWarning,
                stacklevel=2,
            )

    with register_module_forward_pre_hook(look):
        yield
