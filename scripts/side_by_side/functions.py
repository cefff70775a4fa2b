"""How a library's module describes its functions."""

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
    """A function of a library: how to call the library's version and ours, and the rule for the right result.

    `cases` are the cases to run. `in_place` says that the function writes into the gradients, so a leaf that is listed
    twice has no right answer. `formats` are the formats of the random inputs; empty if the function does not clip.
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
    """A library's functions. `compiles` says that each new shape and format costs a compilation."""

    name: str
    version: str
    functions: Sequence[Function]
    compiles: bool = False


def function(name: str, call: Callable[[Any], Call], peer: Any, ours: Any, rule: RightRule, **more: Any) -> Function:
    """Return a function that both modules call in the same way."""
    return Function(name, call(peer), call(ours), rule, **more)
