"""PyTorch: CPU tensors as host memory; any other device, and tracing, through the portable operations."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from gradclip.backends.torch.device import Torch
from gradclip.backends.torch.host import TorchHost
from gradclip.backends.torch.tensors import PLAIN

_is_cpu = attrgetter("is_cpu")


def in_host_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether the values of all tensors lie in host memory, as plain tensors."""
    return set(map(type, tensors)) <= PLAIN and all(map(_is_cpu, tensors))


def visible(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether values can be looked at: nothing that records operations or transforms them stands between."""
    if torch.compiler.is_compiling() or _records_operations():
        return False
    # There is no public way to ask for the transforms of `torch.func` that are at work.
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is None or not any(map(functorch.is_functorch_wrapped_tensor, tensors))


def _records_operations() -> bool:
    """Say whether `make_fx` is at work, whose tensors look like any other."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def backend(leaves: Sequence[Any], scalars: Sequence[Any]) -> TorchHost | Torch:
    """Return the backend for these tensors: the host's where all of them lie in its memory.

    Raises RuntimeError under `torch.jit.trace`, which cannot record what is done to the bits of numbers.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            "gradients cannot be clipped under torch.jit.trace: what it records would not depend on their values. "
            "Use torch.compile or torch.export, or leave clipping out of what is traced."
        )
    given = [scalar for scalar in scalars if isinstance(scalar, torch.Tensor)]
    # The usual call has only leaves on the CPU: it is recognised without a list of its tensors.
    here = not (given or torch.compiler.is_compiling()) and in_host_memory(leaves)
    tensors = leaves if here else [leaf for leaf in (*leaves, *given) if isinstance(leaf, torch.Tensor)]
    seen = visible(tensors)
    if seen and (here or in_host_memory(tensors)):
        return HOST
    # Norms come back on the device of the first leaf.
    return Torch(tensors[0].device, visible=seen)


def on_fast_path(leaves: Sequence[Any]) -> TorchHost | None:
    """Return the backend for plain tensors in host memory, not parameters, if nothing records what is done to them."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    plain = torch.nn.Parameter not in set(map(type, leaves)) and in_host_memory(leaves)
    return HOST if plain and visible(leaves) else None


HOST = TorchHost()
