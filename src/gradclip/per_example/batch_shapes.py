"""Shapes of batches: what the last bits of an example's gradient depend on besides the example."""

from dataclasses import replace

from gradclip.per_example.promise import Sensitivity

_AT_A_TIME = 8


def whole_program(rows: int) -> int:
    """Return how many rows a program for so many has, if none of them is computed in another way than the others.

    Libraries for matrices take some rows at a time, and what is left over one by one, which adds in another order.
    """
    return rows if rows == 1 else -(-rows // _AT_A_TIME) * _AT_A_TIME


def promise_for(
    promise: Sensitivity, *, method: str, microbatch_size: int | None, pad_to: int | None, named: str
) -> Sensitivity:
    """Return a promise that says of which batches it speaks; without limit where one more example changes all others.

    `named` is the function that was told `pad_to` and `microbatch_size`.
    """
    units = f"{promise.unit}s"
    if promise.relation != "add_or_remove_one":
        return replace(promise, note=f"batches of one number of {units}")
    if method == "loop":
        return replace(promise, note=f"{units} taken one after the other")
    if microbatch_size is None and pad_to is None:
        return promise.without_limit(
            "one more or less changes the shape of a batch, and so the last bits of every gradient in it. Pass "
            f"{named} pad_to=, the most {units} that a batch can have, or microbatch_size="
        )
    if microbatch_size is None:
        return replace(promise, note=f"batches padded to {pad_to} {units}")
    if microbatch_size != whole_program(microbatch_size):
        return promise.without_limit(
            f"in microbatches of {microbatch_size} the last bits of a gradient depend on its place, and one more or "
            f"less moves the others on. Pass microbatch_size=1 or a multiple of {_AT_A_TIME}"
        )
    return replace(promise, note=f"microbatches of {microbatch_size} {units}")
