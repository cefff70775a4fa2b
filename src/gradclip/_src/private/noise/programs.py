"""Exact noise in programs of `jax.jit` and `torch.compile`: each run calls back to the host, which draws it."""

from collections.abc import Callable, Sequence
from typing import Any

from gradclip._src.backends.registry import being_compiled, entries_of, recording
from gradclip._src.private.noise.exact import AskedNoise


def noise_in_programs(leaves: Sequence[Any], asked: AskedNoise) -> list[Any]:
    """Return recorded arrays plus noise that each run of the program draws. Raise ValueError where that cannot be."""
    called_back = _callback_for(leaves)
    if called_back is None:
        raise ValueError(
            f"rng={asked.source!r} draws outside of code that is recorded in this way. Return the sum from it, and "
            "call add_noise on that."
        )
    return called_back(leaves, asked)


# Each import is a statement: `torch.compile` cannot trace any other kind.
def _callback_for(leaves: Sequence[Any]) -> Callable[[Sequence[Any], AskedNoise], list[Any]] | None:
    modules = {entry.module for entry in entries_of(leaves)}
    if being_compiled():
        if modules != {"torch"}:
            return None
        from gradclip._src.private.noise.torch import called_back

        return called_back
    records = recording()
    if modules | ({records.module} if records else set()) | {"numpy"} == {"jax", "numpy"}:
        from gradclip._src.private.noise.jax import called_back

        return called_back
    return None
