"""`torch.nn.utils`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gradclip.integrations import torch as ours
from side_by_side.cases import FEW, NORMS
from side_by_side.exact import Clamp, Norm, Rule, together
from side_by_side.formats import numpy_dtype
from side_by_side.functions import Call, Library, function
from side_by_side.verdict import Answer

peer = torch.nn.utils
BFLOAT16 = numpy_dtype("bfloat16")


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(BFLOAT16)
    return np.asarray(tensor.detach())


def parameters(leaves: Sequence[np.ndarray]) -> list[torch.nn.Parameter]:
    """Return parameters with copies of the leaves as gradients. A leaf listed twice becomes one parameter."""
    made: dict[int, torch.nn.Parameter] = {}
    for leaf in leaves:
        if id(leaf) not in made:
            grad = tensor(leaf)
            made[id(leaf)] = torch.nn.Parameter(torch.zeros_like(grad))
            made[id(leaf)].grad = grad
    return [made[id(leaf)] for leaf in leaves]


def _gradients(listed: list[torch.nn.Parameter]) -> list[np.ndarray]:
    return [array(p.grad) for p in listed]


def clip_grad_norm(norm_type: float = 2.0) -> Callable[[Any], Call]:
    def of(module: Any) -> Call:
        def call(leaves: list[np.ndarray], threshold: float) -> Answer:
            listed = parameters(leaves)
            norm = module.clip_grad_norm_(listed, threshold, norm_type)
            return Answer(_gradients(listed), [array(norm)])

        return call

    return of


def clip_grad_value(module: Any) -> Call:
    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        listed = parameters(leaves)
        module.clip_grad_value_(listed, threshold)
        return Answer(_gradients(listed))

    return call


def get_total_norm(norm_type: float = 2.0) -> Callable[[Any], Call]:
    def of(module: Any) -> Call:
        return lambda leaves, _: Answer([], [array(module.get_total_norm(list(map(tensor, leaves)), norm_type))])

    return of


def clip_grads_with_norm(module: Any) -> Call:
    """Return a call with the norm that the module itself computes."""

    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        listed = parameters(leaves)
        module.clip_grads_with_norm_(listed, threshold, module.get_total_norm([p.grad for p in listed]))
        return Answer(_gradients(listed))

    return call


def _of_order(order: float, name: str) -> list:
    rule = Rule(together, order)
    few = {"cases": FEW, "formats": ("float32", "bfloat16", "float64")}
    return [function(f"clip_grad_norm_ ({name})", clip_grad_norm(order), peer, ours, rule, in_place=True, **few)]


LIBRARY = Library(
    "PyTorch",
    torch.__version__.split("+")[0],
    [
        function("clip_grad_norm_", clip_grad_norm(), peer, ours, Rule(together), in_place=True),
        *_of_order(1.0, "1-norm"),
        *_of_order(3.0, "3-norm"),
        *_of_order(math.inf, "inf-norm"),
        function("clip_grad_value_", clip_grad_value, peer, ours, Clamp(), in_place=True),
        function("get_total_norm", get_total_norm(), peer, ours, Norm(), cases=NORMS, formats=()),
        function("clip_grads_with_norm_", clip_grads_with_norm, peer, ours, Rule(together), in_place=True),
    ],
)
