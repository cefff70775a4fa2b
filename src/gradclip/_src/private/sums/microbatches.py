"""How many examples are in memory at a time, by number or by bytes, and the shapes of batches that a promise holds for.

Private sums need microbatches of one size: one program then computes every example, whoever the others are. So the size
follows from what neighbouring batches share, the parameters and `pad_to`, and never from the batch or from free memory.
"""

import math
import re
from dataclasses import dataclass, replace

from gradclip._src.core.values import shape_of
from gradclip._src.private.sums.sensitivity import Sensitivity
from gradclip._src.private.sums.settings import as_number_of_examples
from gradclip._src.tree import flatten
from gradclip._src.words import shown

_AT_A_TIME = 8


def whole_program(rows: int) -> int:
    """Round a number of rows up to 1 or a multiple of 8, so that fewer places differ.

    Matrix libraries process rows in blocks and add the remainder in a different order. No number of rows makes all
    places alike in every library.
    """
    return rows if rows == 1 else -(-rows // _AT_A_TIME) * _AT_A_TIME


def promise_for(
    promise: Sensitivity, method: str, microbatch_size: object, pad_to: int | None, *, keyed: bool, named: str
) -> Sensitivity:
    """Add to a promise a note on the batches it holds for; make it infinite if one more example changes all others.

    `microbatch_size`: None for the whole batch; its text says the size. `keyed`: each place has a random key. `named`
    is the function that takes `pad_to` and `microbatch_size`.
    """
    units = f"{promise.unit}s"
    alone = method == "loop" or microbatch_size == 1
    if promise.relation != "add_or_remove_one":
        note = f"batches with the same number of {units}"
    elif alone:
        note = f"{units} computed one at a time"
    elif microbatch_size is None and pad_to is None:
        why = "adding or removing one changes the shape of the batch, and with it the last bits of every gradient"
        advice = f"Pass {named} pad_to=, the most {units} that a batch can have, or microbatch_size="
        return replace(promise, bound=math.inf, rounding=0.0, note=f"{why}. {advice}")
    else:
        note = f"batches padded to {pad_to} {units}"
        note = note if microbatch_size is None else f"microbatches of {microbatch_size} {units}"
    if alone and not keyed:
        return replace(promise, note=note)
    removal = ", where mask= removes one" if promise.relation == "add_or_remove_one" else ""
    return replace(promise, note=f"{note} that keep their places{removal}", keeps_places=True)


AUTO = "256 MiB"
"""The bytes that gradients may take if the size is "auto"."""

MOST = 256
"""The most examples in a microbatch whose size follows from bytes, if no `pad_to` says how large a batch can be."""

_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(KiB|MiB|GiB)\s*")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Memory:
    """The size of a microbatch whose gradients take at most so many bytes."""

    bytes: int

    def __str__(self) -> str:
        return f"up to {self.bytes / 2**20:g} MiB of"


def as_microbatch_size(value: object, *, sized: bool) -> int | Memory | None:
    """Return a number of examples, or the `Memory` that a text says.

    `sized`: the bytes of an example are known before the function is called. Raises ValueError for a text if they are
    not, TypeError for a text that says no bytes; for other values as `as_number_of_examples`.
    """
    if value is None or isinstance(value, Memory):
        return value
    if not isinstance(value, str):
        return as_number_of_examples("microbatch_size", value)
    if not sized:
        raise ValueError(
            f"microbatch_size must be a number of examples, got {shown(value)}. Bytes need the size of a gradient, "
            "which is that of the parameters; the size of a function's result is not known before it is called."
        )
    found = _BYTES.fullmatch(AUTO if value == "auto" else value)
    budget = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not budget:
        raise TypeError(
            "microbatch_size must be a whole number, 1 or more, 'auto', or the bytes that gradients may take, in KiB, "
            f"MiB or GiB, such as '512 MiB', got {shown(value)}."
        )
    return Memory(budget)


def examples_in(memory: Memory, parameters: object, pad_to: int | None) -> int:
    """Return the number of examples in a microbatch: the most whose gradients fit in the memory, 1 or more.

    That number is at most `pad_to` or `MOST`. From 8 on it is a multiple of 8. Microbatches of `pad_to` examples are
    made about equally long.
    """
    most = MOST if pad_to is None else whole_program(pad_to)
    fits = min(most, max(1, memory.bytes // max(1, bytes_of(parameters))))
    fits = fits if fits < 8 else fits // 8 * 8
    return fits if pad_to is None else min(fits, whole_program(math.ceil(most / math.ceil(most / fits))))


def bytes_of(tree: object) -> int:
    """Return the bytes of all arrays of a tree. A Python number counts as 8."""
    return sum(_bytes_of_leaf(leaf) for leaf in flatten(tree).leaves)


def _bytes_of_leaf(leaf: object) -> int:
    dtype = getattr(leaf, "dtype", None)
    # TensorFlow's dtypes call it `size`.
    width = 8 if dtype is None else getattr(dtype, "itemsize", None) or dtype.size
    return math.prod(shape_of(leaf)) * int(width)
