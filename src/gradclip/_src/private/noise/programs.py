"""Exact noise in programs of `jax.jit` and `torch.compile`: each run calls back to the host, which draws it."""

from collections.abc import Callable, Sequence
from typing import Any

from gradclip._src.backends.registry import being_compiled, entries_of
from gradclip._src.private.noise.exact import ExactNoise


def noise_in_programs(leaves: Sequence[Any], noise: ExactNoise) -> list[Any]:
    """Return recorded arrays plus noise that each run of the program draws. Raise ValueError where that cannot be."""
    called_back = _callback_of({entry.module for entry in entries_of(leaves)} - {"numpy"})
    if called_back is None:
        raise ValueError(
            f"rng={noise.source!r} draws outside of code that is recorded in this way. Return the sum from it, and "
            "call add_noise on that."
        )
    return called_back(leaves, noise)


# Each import is a statement: `torch.compile` cannot trace any other kind.
def _callback_of(modules: set[str]) -> Callable[[Sequence[Any], ExactNoise], list[Any]] | None:
    if modules == {"jax"}:
        from gradclip._src.private.noise.jax import called_back

        return called_back
    if modules == {"torch"} and being_compiled():
        from gradclip._src.private.noise.torch import called_back

        return called_back
    return None
