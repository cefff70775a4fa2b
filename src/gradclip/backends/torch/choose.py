"""Choose PyTorch's backend: the host's for plain CPU tensors, otherwise the portable one for devices and tracing."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from gradclip.backends.torch.device import Torch
from gradclip.backends.torch.host import TorchHost
from gradclip.backends.torch.tensors import PLAIN

_is_cpu = attrgetter("is_cpu")


def in_host_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether all tensors are plain tensors on the CPU."""
    return set(map(type, tensors)) <= PLAIN and all(map(_is_cpu, tensors))


def visible(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether values can be read: nothing is recording or transforming the operations."""
    if torch.compiler.is_compiling() or _records_operations():
        return False
    # There is no public API for the active transforms of `torch.func`.
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is None or not any(map(functorch.is_functorch_wrapped_tensor, tensors))


def _records_operations() -> bool:
    """Say whether `make_fx` is recording. Its tensors look like any others."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> TorchHost | Torch:
    """Return the backend for these tensors: the host's if all of them are in host memory.

    Raises RuntimeError under `torch.jit.trace`, which cannot record operations on the bits of numbers.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            "gradients cannot be clipped under torch.jit.trace, which would record a coefficient that ignores their "
            "values. Use torch.compile or torch.export, or keep clipping out of the traced function."
        )
    given = [scalar for scalar in scalars if isinstance(scalar, torch.Tensor)]
    # The usual call has only CPU leaves. It is recognized without building a list of tensors.
    here = not (given or torch.compiler.is_compiling()) and in_host_memory(leaves)
    tensors = leaves if here else [leaf for leaf in (*leaves, *given) if isinstance(leaf, torch.Tensor)]
    seen = visible(tensors)
    if seen and (here or in_host_memory(tensors)):
        return HOST
    # Norms are returned on the device of the first leaf.
    return Torch(tensors[0].device, visible=seen)


def on_fast_path(leaves: Sequence[Any]) -> TorchHost | None:
    """Return the backend for plain CPU tensors that are not parameters, if nothing records operations; else None."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    plain = torch.nn.Parameter not in set(map(type, leaves)) and in_host_memory(leaves)
    return HOST if plain and visible(leaves) else None


HOST = TorchHost()
