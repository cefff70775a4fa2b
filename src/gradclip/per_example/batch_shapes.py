"""Shapes of batches. The last bits of an example's gradient depend on them."""

from dataclasses import replace

from gradclip.per_example.promise import Sensitivity

_AT_A_TIME = 8


def whole_program(rows: int) -> int:
    """Round a number of rows up to 1 or a multiple of 8, so that a program computes every row the same way.

    Matrix libraries process rows in blocks and add the remainder in a different order.
    """
    return rows if rows == 1 else -(-rows // _AT_A_TIME) * _AT_A_TIME


def promise_for(
    promise: Sensitivity, *, method: str, microbatch_size: int | None, pad_to: int | None, named: str
) -> Sensitivity:
    """Add to a promise a note on the batches it holds for; make it infinite if one more example changes all others.

    `named` is the function that takes `pad_to` and `microbatch_size`.
    """
    units = f"{promise.unit}s"
    if promise.relation != "add_or_remove_one":
        return replace(promise, note=f"batches with the same number of {units}")
    if method == "loop":
        return replace(promise, note=f"{units} taken one after the other")
    if microbatch_size is None and pad_to is None:
        return promise.without_limit(
            "adding or removing one changes the shape of the batch, and with it the last bits of every gradient. Pass "
            f"{named} pad_to=, the most {units} that a batch can have, or microbatch_size=, 1 or a multiple of "
            f"{_AT_A_TIME}"
        )
    if microbatch_size is None:
        return replace(promise, note=f"batches padded to {pad_to} {units}")
    if microbatch_size != whole_program(microbatch_size):
        return promise.without_limit(
            f"in microbatches of {microbatch_size} the last bits of a gradient depend on its place, and adding or "
            f"removing one moves the others. Pass microbatch_size=1 or a multiple of {_AT_A_TIME}"
        )
    return replace(promise, note=f"microbatches of {microbatch_size} {units}")
