"""A call of a clipped function: its arguments as a function of one example takes them, and the outputs of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

from gradclip._src.backends.entries import Entry
from gradclip._src.backends.imported import exportable
from gradclip._src.private.batching.verbs import Args, Axes, Batching, NoLossError, mapped
from gradclip._src.public import public
from gradclip._src.words import listed


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


@public
@exportable
class ExampleOutputs(NamedTuple):
    """Outputs for each example, with the batch on axis 0 of each leaf; None for those you did not ask for.

    Attributes:
        values: what the function returned.
        norms: the norm before clipping. For a tree of thresholds, a tree of its structure.
        aux: the function's second result.

    All of them reveal single examples. The noise on the sum does not protect them.
    """

    values: Any = None
    norms: Any = None
    aux: Any = None


def value_and_aux(result: Any, *, has_aux: bool, keep_batch_dim: bool) -> tuple[Any, Any]:
    """Return the value and the auxiliary result of one example, the latter without a batch axis that was kept.

    Raises TypeError if there should be two results and are not.
    """
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(f"with has_aux=True fun must return a pair, (value, aux), got a {type(result).__name__}.")
    value, aux = result if has_aux else (result, ())
    return value, mapped(_without_batch_axis, aux) if keep_batch_dim else aux


def check_loss(value: object) -> None:
    """Raise NoLossError, a ValueError, if what is to be differentiated is an array with axes, or is no array at all.

    A number of Python passes: whether it counts as a constant is the framework's to say.
    """
    shape: Any = getattr(value, "shape", None)
    if shape is None:
        if not isinstance(value, Number):
            raise NoLossError(_instead_of_one_number(value))
    elif getattr(shape, "rank", 0) is not None and len(shape):  # a rank of None: TensorFlow does not know it yet
        more = " If it adds an axis for the batch, such as x[None], pass keep_batch_dim=True in its place."
        raise NoLossError(
            f"an array of shape {tuple(shape)}. Return its mean or its sum. With reduction='none' a loss returns a "
            "vector, also for a batch of one: leave that out."
            f"{more if tuple(shape)[:1] == (1,) else ''}"
        )


def _instead_of_one_number(value: object) -> str:
    """Return what a function has returned, and what to return instead."""
    if value is None:
        return "None. Return the loss at the end of the function."
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        more = " If it is (loss, aux), pass has_aux=True." if len(value) == 2 else ""
        return f"a {kind} of {len(value)}. Return the loss alone.{more}"
    if isinstance(value, Mapping):
        return f"a {kind} with the keys {listed([*value])}. Return the one that is the loss."
    return f"an object of type {kind}. Return the array of the loss."


def _without_batch_axis(x: object) -> Any:
    return x[0] if getattr(x, "shape", ())[:1] == (1,) else x  # type: ignore[index]
