"""Functions of one example over a batch, for PyTorch: `torch.func.vmap` or a loop, and microbatches one after another.

Each example draws its own random numbers, for dropout for example.
"""

import warnings
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from gradclip._src.backends.torch.framework import visible
from gradclip._src.backends.torch.tensors import tensor_of
from gradclip._src.private.batching.torch_example import (
    TensorsOf,
    TorchGradient,
    alone,
    batch_norm_named,
    example,
    explained,
)
from gradclip._src.private.batching.verbs import (
    Args,
    Axes,
    Batching,
    Function,
    Step,
    Transform,
    mapped,
    mapped_args,
    transformed,
)
from gradclip._src.tree import flatten


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
                made = torch.func.vmap(of_leaves, randomness="different")(leaves)
            return made if torch.compiler.is_compiling() else listed.back(made)

        def watched(*args: object) -> Any:
            if torch.compiler.is_compiling():
                return call(*args)
            with batch_norm_named():
                try:
                    return call(*args)
                except Exception as error:
                    better = explained(error, fun, args, axes)
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

    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        def call(*args: object) -> Any:
            batches = [flatten(arg).leaves for axis, arg in zip(axes, args, strict=True) if axis is not None]
            count = len(next(leaf for leaves in batches for leaf in leaves))
            with batch_norm_named():
                rows = [alone(fun, *example(args, axes, i)) for i in range(count)]
            return mapped(lambda *parts: torch.stack(parts), *rows)

        return call


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
