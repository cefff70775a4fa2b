"""What a library's module says of its functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from side_by_side.cases import CASES
from side_by_side.verdict import Answer, RightRule

Call = Callable[[list[np.ndarray], float], Answer]
FORMATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Function:
    """A function of a library: how the peer's is called and ours, and what is right.

    `cases`: which of them. `in_place`: whether gradients are written where they lie, so that what is listed twice has
    no right answer. `formats`: those of the random inputs, none for what does not clip.
    """

    name: str
    theirs: Call
    ours: Call
    rule: RightRule
    cases: Sequence[str] = tuple(CASES)
    in_place: bool = False
    formats: Sequence[str] = FORMATS


@dataclass(frozen=True)
class Library:
    """`compiles`: whether each new shape and format costs a compilation."""

    name: str
    version: str
    functions: Sequence[Function]
    compiles: bool = False


def function(name: str, call: Callable[[Any], Call], peer: Any, ours: Any, rule: RightRule, **more: Any) -> Function:
    """Return a function of two modules that is called in one way."""
    return Function(name, call(peer), call(ours), rule, **more)
