"""A call of a clipped function, as a function of one example takes its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradclip._src.backends.entries import Entry
from gradclip._src.private.batching.verbs import Args, Axes, Batching


class PreparedCall(NamedTuple):
    """The checked arguments of a call.

    Attributes:
        framework: the framework that differentiates.
        verbs: its batching operations.
        args: the arguments. The last is the dict of keyword arguments.
        axes: for each argument 0 if it carries the batch, else None.
        kinds: the arguments that were opened, by position: mappings that are not trees.
        examples: their number.
        flags: the mask as the framework's booleans, None for all examples.
    """

    framework: Entry
    verbs: Batching
    args: Args
    axes: Axes
    kinds: Mapping[int, Any]
    examples: int
    flags: Any


class Clipped(NamedTuple):
    """A batch that was clipped and added up: the sum, the norms, leaves with the batch in front, and `(values, aux)`.

    Of the leaves only shapes and dtypes are asked.
    """

    summed: Any
    norms: Any
    leaves: Any
    outputs: tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Outline:
    """What is asked of an array whose values do not matter. It is a leaf of a tree, as a named tuple would not be."""

    shape: tuple[int, ...]
    dtype: Any
