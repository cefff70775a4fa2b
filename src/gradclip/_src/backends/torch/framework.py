"""The front of PyTorch's folder: which backend a call takes, and what else the registry asks.

The backend is the host's for plain CPU tensors, otherwise the portable one for devices and tracing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip._src.backends import USUAL
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.torch.device import Torch
from gradclip._src.backends.torch.host import TorchHost
from gradclip._src.backends.torch.launched import TorchOnDevice
from gradclip._src.backends.torch.tensors import PLAIN, default_float, numbers, on_host, sent
from gradclip._src.tree import Sparse

_OF_TENSORS = frozenset(dir(torch.Tensor))
_SAY_NOTHING = {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__slots__"}
_SAY_NOTHING |= {"__init__", "__new__", "__repr__", "__str__", "__format__", "__init_subclass__"}
"""Names that a class may define although tensors have them."""


@dataclass(frozen=True)
class Wrapped:
    """Tensors without the subclasses that only wrap them, and the `tensors` as they were."""

    locals: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> "Wrapped | None":
        """Unwrap tensors, or return None if no subclass only wraps."""
        wrapping = {kind for kind in set(map(type, tensors)) - PLAIN if _only_wraps(kind)}
        if not wrapping:
            return None
        return cls([x.as_subclass(torch.Tensor) if type(x) in wrapping else x for x in tensors], tensors)

    def chosen(self, indices: Sequence[int]) -> "Wrapped":
        """Return the tensors at `indices`."""
        return Wrapped([self.locals[i] for i in indices], [self.tensors[i] for i in indices])

    def whole(self, updated: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the new tensors, wrapped as before, when those without their subclasses become `updated`."""
        if updated is self.locals:
            return self.tensors
        every = zip(updated, self.locals, self.tensors, strict=True)
        return [tensor if new is local else new.as_subclass(type(tensor)) for new, local, tensor in every]


@lru_cache(maxsize=64)
def _only_wraps(kind: type) -> bool:
    """Say whether a class is a subclass of tensors that redefines nothing of them."""
    if not issubclass(kind, torch.Tensor):
        return False
    classes = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    own = {name for one in classes if one not in PLAIN for name in vars(one)}
    return not (own & _OF_TENSORS) - _SAY_NOTHING


_IS_CPU, _REQUIRES_GRAD = attrgetter("is_cpu"), attrgetter("requires_grad")
_DEEPSPEED = (
    "DeepSpeed holds this gradient. Call gradclip.clip_at_step(engine, max_norm) once before "
    "training: its engine then clips at step() to max_norm, a number or a gradclip.AdaptiveThreshold"
)
_MEGATRON = (
    "it lies in .main_grad, as in Megatron. Call gradclip.clip_at_step(optimizer, max_norm) once "
    "before training: its optimizer then clips at step() to max_norm, a number or a gradclip.AdaptiveThreshold. If you "
    "step yourself, pass [types.SimpleNamespace(grad=p.main_grad) for p in parameters]"
)
_ENGINES = {"ds_id": _DEEPSPEED, "_hp_mapping": _DEEPSPEED, "main_grad": _MEGATRON}
"""Training engines that hold gradients in buffers of their own, by the attributes that they give to parameters.

DeepSpeed gives the first in ZeRO stage 3, the second in stages 1 and 2.
"""
_TAKEN = "_hp_grad"
"""Where DeepSpeed's BF16_Optimizer adds gradients up. It ignores those in `.grad`, which it has taken already."""

HOST = TorchHost()
USUAL.update(PLAIN)


class PyTorch(Framework):
    """Tensors on any device."""

    namespace = namespace
    on_host = staticmethod(on_host)
    numbers = staticmethod(numbers)

    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> TorchHost | Torch:
        # It cannot record operations on the bits of numbers.
        if torch.jit.is_tracing():
            raise RuntimeError(
                "gradients cannot be clipped under torch.jit.trace, which would record a coefficient that ignores "
                "their values. Use torch.compile or torch.export, or keep clipping out of the traced function."
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

    def unwrapped(self, arrays: Sequence[Any]) -> Wrapped | None:
        return None if _recorded() else Wrapped.of(arrays)

    def on_fast_path(self, leaves: Sequence[Any]) -> TorchHost | None:
        if _recorded():
            return None
        plain = torch.nn.Parameter not in set(map(type, leaves)) and in_host_memory(leaves)
        return HOST if plain and visible(leaves) else None

    def on_device(self, leaves: Sequence[Any]) -> TorchOnDevice | None:
        if _recorded() or set(map(type, leaves)) != {torch.Tensor} or in_host_memory(leaves):
            return None
        forward = torch.autograd.forward_ad._current_level >= 0
        asked = forward or (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, leaves)))
        # Modes that watch or replace PyTorch's operations do not see kernels.
        watched = torch._C._len_torch_dispatch_stack() > 0
        return None if asked or watched or not visible(leaves) else TorchOnDevice.of(leaves)

    def gradients_of(self, parameters: Sequence[Any]) -> Sequence[Any] | None:
        if not set(map(type, parameters)) <= PLAIN:
            return None
        gradients = [parameter.grad for parameter in parameters]
        found = [grad for grad in gradients if grad is not None]
        if len(found) == len(gradients):
            return None if found and hasattr(parameters[0], _TAKEN) else found
        lacking = [parameters[index] for index, grad in enumerate(gradients) if grad is None]
        # Frozen parameters, often most of all, lack gradients too.
        trained = any(map(_REQUIRES_GRAD, lacking))
        return None if trained and any(map(self.engine_of, lacking)) else found

    generator = "a torch.Generator"

    def noised(self, leaves: Sequence[torch.Tensor], std: float, rng: Any) -> list[torch.Tensor] | None:
        if not isinstance(rng, torch.Generator):
            return None

        def noised(x: torch.Tensor) -> torch.Tensor:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            return (x.to(wide) + std * torch.randn(x.shape, generator=rng, dtype=wide, device=x.device)).to(x.dtype)

        return [noised(x) for x in leaves]

    def like(self, leaf: torch.Tensor, dtype: str, values: np.ndarray) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=getattr(torch, dtype), device="cpu"), leaf.device)

    def zeros(self, shape: tuple[int, ...], leaf: torch.Tensor) -> torch.Tensor:
        return leaf.new_zeros(shape)

    def as_float(self, array: torch.Tensor) -> torch.Tensor:
        return array.to(default_float())

    def kept(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().clone()

    def beside(self, array: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return sent(array.detach(), like.device)

    def first_sparse(self, leaves: Sequence[Any]) -> Sparse | None:
        for index, leaf in enumerate(leaves):
            if getattr(leaf, "is_nested", False):
                return Sparse(index, "a nested tensor", ".to_padded_tensor(0.0)")
            if getattr(leaf, "layout", torch.strided) is not torch.strided:
                return Sparse(index, f"a {leaf.layout} tensor", ".to_dense()")
        return None

    def without_values(self, array: torch.Tensor) -> str | None:
        return "a tensor on the meta device" if array.is_meta else None

    def engine_of(self, parameter: torch.Tensor) -> str:
        # Compiled code cannot ask for `vars`.
        if getattr(parameter, _TAKEN, None) is not None:
            return _DEEPSPEED
        if parameter.grad is not None or not parameter.requires_grad:
            return ""
        marks = vars(parameter)
        for mark in _ENGINES.keys() & marks.keys():
            if marks[mark] is not None or mark == "_hp_mapping":  # None in processes that hold no part of the parameter
                return _ENGINES[mark]
        return ""

    def is_bare(self, parameter: torch.Tensor) -> bool:
        # A parameter made from a tensor subclass keeps that type, and is marked instead.
        is_parameter = type(parameter).__name__ == "Parameter" or getattr(parameter, "_is_param", False)
        return not (parameter.requires_grad or is_parameter)


def _recorded() -> bool:
    """Say whether a compiler or `torch.jit.trace` records what is done."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def in_host_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether all tensors are plain tensors on the CPU."""
    return set(map(type, tensors)) <= PLAIN and all(map(_IS_CPU, tensors))


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


TORCH = PyTorch()
