"""`brainstate.nn`."""

import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from gradclip.integrations import brainstate as ours
from side_by_side.cases import FEW
from side_by_side.exact import Rule, together
from side_by_side.functions import Call, Library, function
from side_by_side.libraries.jax_arrays import on_arrays

FORMATS = ("float32", "bfloat16", "float64")


def clip_grad_norm(norm_type: float = 2.0) -> Callable[[Any], Call]:
    def of(module: Any) -> Call:
        def clip(leaves: list[jax.Array], threshold: float) -> tuple[Any, list[Any]]:
            clipped, norm = module.clip_grad_norm(leaves, threshold, norm_type, True)
            return clipped, [norm]

        return on_arrays(clip)

    return of


def of_order(name: str, order: float) -> Any:
    rule = Rule(together, order)
    call = clip_grad_norm(order)
    return function(f"clip_grad_norm ({name})", call, brainstate.nn, ours, rule, cases=FEW, formats=FORMATS)


LIBRARY = Library(
    "brainstate",
    brainstate.__version__,
    [
        function("clip_grad_norm", clip_grad_norm(), brainstate.nn, ours, Rule(together)),
        of_order("1-norm", 1.0),
        of_order("inf-norm", math.inf),
    ],
    compiles=True,
)
