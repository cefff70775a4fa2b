"""Shapes of batches and places in them. The last bits of an example's gradient depend on both."""

import math
from dataclasses import replace

from gradclip._src.private.sums.sensitivity import Sensitivity

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
