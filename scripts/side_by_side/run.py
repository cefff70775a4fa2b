"""Call the functions and judge their answers."""

import importlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from side_by_side.cases import CASES, SLOW, Case, batch_of, random_case
from side_by_side.exact import Summed
from side_by_side.functions import Call, Function, Library
from side_by_side.verdict import Answer, Refusal, judge

MODULES = {
    "PyTorch": "pytorch",
    "optax": "optax",
    "jax-privacy": "jax_privacy",
    "brainstate": "brainstate",
    "declearn": "declearn",
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "Lucid": "lucid",
}
RANDOM_INPUTS = 1000


def library(name: str) -> Library:
    return importlib.import_module(f"side_by_side.libraries.{MODULES[name]}").LIBRARY


def answered(call: Call, case: Case) -> Answer | Refusal:
    """Return the answer of a call, or the error that it raises. Ignore warnings."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return call(case.leaves, case.threshold)
        except Exception as error:
            return Refusal(type(error).__name__, str(error).split("\n")[0])


def rows(of: Library, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the verdict for each function and case. `quick` skips the cases that cost a compilation."""
    for function in of.functions:
        for name in function.cases:
            if quick and of.compiles and name in SLOW:
                continue
            case = CASES[name]
            if isinstance(function.rule, Summed):
                case = Case(batch_of(case.leaves), case.threshold)
            defined = case.answerable and not (function.in_place and case.repeats)
            answers = [answered(call, case) for call in (function.theirs, function.ours)]
            verdict = judge(*answers, function.rule, case, defined)
            yield {"function": function.name, "case": name, **verdict._asdict()}


class Bound(NamedTuple):
    """The number of inputs for which the norm is at most the threshold, and the largest relative excess over it."""

    kept: int
    worst: float
    worst_float32: float


def bounds(of: Library, count: int = RANDOM_INPUTS) -> Iterator[dict[str, Any]]:
    """Yield, for each function that clips, how often the library and gradclip keep the bound on random inputs."""
    for function in of.functions:
        if function.formats:
            theirs, ours = (bound_of(function, call, count)._asdict() for call in (function.theirs, function.ours))
            yield {"function": function.name, "inputs": count, "theirs": theirs, "ours": ours}


def bound_of(function: Function, call: Call, count: int) -> Bound:
    """Return how often a call keeps its bound on the first `count` random inputs."""
    excesses: dict[str, list[float]] = {dtype: [] for dtype in function.formats}
    for seed in range(count):
        dtype = function.formats[seed % len(function.formats)]
        excesses[dtype].append(_excess(function, call, random_case(seed, dtype)))
    found = [x for each in excesses.values() for x in each]
    return Bound(sum(x == 0.0 for x in found), max(found), max(excesses.get("float32", [0.0])))


def _excess(function: Function, call: Call, case: Case) -> float:
    if isinstance(function.rule, Summed):
        case = Case([x[None] for x in case.leaves], case.threshold)
    answer = answered(call, case)
    if isinstance(answer, Refusal):
        raise RuntimeError(f"{function.name} refuses an ordinary input: {answer.error}: {answer.message}")
    return function.rule.excess(answer.leaves, case.leaves, case.threshold)
