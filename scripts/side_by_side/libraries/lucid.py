"""`lucid.nn.util`, on real parameters. Their gradients are NumPy arrays."""

import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from lucid import nn
from lucid.nn import util as peer

from gradclip.integrations import lucid as ours
from side_by_side.cases import CASES, FEW, NORMS
from side_by_side.exact import Clamp, Norm, Rule, together
from side_by_side.functions import Call, Function, Library, function
from side_by_side.verdict import Answer

EPS = 1e-7
FORMATS = ("float32", "float16", "float64")


def _kept(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the formats that Lucid does not have."""
    return tuple(name for name in names if "bfloat16" not in name)


def parameters(leaves: list[np.ndarray]) -> list[Any]:
    """Return parameters with copies of the leaves as gradients. A leaf listed twice becomes one parameter."""
    made: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in made:
            made[id(leaf)] = nn.Parameter(np.zeros(leaf.shape))
            made[id(leaf)].grad = leaf.copy()
    return [made[id(leaf)] for leaf in leaves]


def clip_grad_norm(norm_type: float = 2) -> Callable[[Any], Call]:
    def of(module: Any) -> Call:
        def call(leaves: list[np.ndarray], threshold: float) -> Answer:
            listed = parameters(leaves)
            norm = module.clip_grad_norm(listed, threshold, norm_type, EPS)
            return Answer([np.asarray(p.grad) for p in listed], [_norm(norm, leaves)])

        return call

    return of


def clip_grad_value(module: Any) -> Call:
    def call(leaves: list[np.ndarray], threshold: float) -> Answer:
        listed = parameters(leaves)
        module.clip_grad_value(listed, threshold)
        return Answer([np.asarray(p.grad) for p in listed])

    return call


def grad_norm(module: Any) -> Call:
    return lambda leaves, _: Answer([], [_norm(module.grad_norm(parameters(leaves)), leaves)])


def _norm(norm: Any, leaves: list[np.ndarray]) -> np.ndarray:
    """Return a norm in the gradients' precision, at least float32, because Lucid's scalar tensors are float64."""
    return np.asarray(norm.data, np.result_type(np.float32, *(x.real.dtype for x in leaves)))


def _of_order(name: str, order: float, formats: tuple[str, ...] = FORMATS) -> Function:
    rule = Rule(together, order, added=EPS)
    few = {"cases": _kept(FEW), "in_place": True, "formats": formats}
    return function(f"clip_grad_norm ({name})", clip_grad_norm(order), peer, ours, rule, **few)


ALL = {"cases": _kept(tuple(CASES)), "in_place": True, "formats": FORMATS}
LIBRARY = Library(
    "Lucid",
    version("lucid-dl"),
    [
        function("clip_grad_norm", clip_grad_norm(), peer, ours, Rule(together, added=EPS), **ALL),
        _of_order("1-norm", 1),
        _of_order("inf-norm", math.inf, ()),
        function("clip_grad_value", clip_grad_value, peer, ours, Clamp(), **ALL),
        function("grad_norm", grad_norm, peer, ours, Norm(), cases=_kept(NORMS), in_place=True, formats=()),
    ],
)
