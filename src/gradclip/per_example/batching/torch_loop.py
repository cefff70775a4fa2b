"""Map functions of one example over a batch in PyTorch, one example at a time, for what `torch.func.vmap` cannot do."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from gradclip.per_example.batching.torch import TorchBatching
from gradclip.per_example.batching.torch_example import alone, batch_norm_named, example
from gradclip.per_example.batching.verbs import mapped
from gradclip.tree import flatten


class TorchLoop(TorchBatching):
    """PyTorch's implementation of `Batching`, with a loop over the examples instead of `vmap`."""

    def over_batch(
        self, fun: Callable[..., Any], axes: Sequence[int | None], spmd_axis_name: Hashable
    ) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            batches = [flatten(arg).leaves for axis, arg in zip(axes, args, strict=True) if axis is not None]
            count = len(next(leaf for leaves in batches for leaf in leaves))
            with batch_norm_named():
                rows = [alone(fun, *example(args, axes, i)) for i in range(count)]
            return mapped(lambda *parts: torch.stack(parts), *rows)

        return call
