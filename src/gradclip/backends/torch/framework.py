"""The registry's entry point for PyTorch."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as namespace

from gradclip.backends.framework import Framework
from gradclip.backends.torch.choose import backend, on_fast_path
from gradclip.backends.torch.engines import engine_of
from gradclip.backends.torch.multi_tensor import sent
from gradclip.backends.torch.tensors import PLAIN, default_float, numbers, on_host
from gradclip.tree import Sparse

_REQUIRES_GRAD = attrgetter("requires_grad")


class Torch(Framework):
    """Tensors on any device."""

    namespace = namespace
    backend = staticmethod(backend)
    on_fast_path = staticmethod(on_fast_path)
    on_host = staticmethod(on_host)
    numbers = staticmethod(numbers)

    def gradients_of(self, parameters: Sequence[Any]) -> Sequence[Any] | None:
        if not set(map(type, parameters)) <= PLAIN:
            return None
        gradients = [parameter.grad for parameter in parameters]
        found = [grad for grad in gradients if grad is not None]
        if len(found) == len(gradients):
            return found
        lacking = [parameters[index] for index, grad in enumerate(gradients) if grad is None]
        # Frozen parameters, often most of all, lack gradients too.
        trained = any(map(_REQUIRES_GRAD, lacking))
        return None if trained and any(map(engine_of, lacking)) else found

    def like(self, leaf: torch.Tensor, dtype: str, values: np.ndarray) -> torch.Tensor:
        return leaf.new_tensor(values, dtype=getattr(torch, dtype))

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
            if getattr(leaf, "layout", torch.strided) is not torch.strided:
                return Sparse(index, f"a {leaf.layout} tensor", ".to_dense()")
        return None

    def without_values(self, array: torch.Tensor) -> str | None:
        return "a tensor on the meta device" if array.is_meta else None

    def engine_of(self, parameter: torch.Tensor) -> str:
        return engine_of(parameter)

    def is_bare(self, parameter: torch.Tensor) -> bool:
        # A parameter made from a tensor subclass keeps that type, and is marked instead.
        is_parameter = type(parameter).__name__ == "Parameter" or getattr(parameter, "_is_param", False)
        return not (parameter.requires_grad or is_parameter)


TORCH = Torch()
