"""Sums over processes of numbers that one of them may fail to compute: then all raise, and nobody waits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gradclip._src.backends.torch.process_groups import rank
from gradclip._src.words import listed


@dataclass(frozen=True)
class Failed:
    """Stands for a number that processes failed to compute, and for each sum with it."""

    told: frozenset[str]

    def __add__(self, other: object) -> "Failed":
        return Failed(self.told | other.told) if isinstance(other, Failed) else self

    __radd__ = __add__


class Attempts:
    """Computes numbers of this process, and keeps an error until the other processes have heard of it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def of(self, compute: Callable[[], Any]) -> Any:
        """Return a number, or what stands for it."""
        try:
            return compute()
        except Exception as error:
            self._error = error
            return Failed(frozenset([f"rank {rank()}: {type(error).__name__}: {error}"]))

    def check(self, totals: Iterable[object]) -> None:
        """Raise this process's error, or a RuntimeError if sums lack a number of another process."""
        if self._error is not None:
            raise self._error
        told = sorted({one for total in totals if isinstance(total, Failed) for one in total.told})
        if told:
            raise_failed(told)


def raise_failed(problems: Sequence[str]) -> NoReturn:
    """Raise a RuntimeError that tells the problems of other processes."""
    raise RuntimeError(
        "the call failed on another process, so the norm over all processes is unknown: "
        f"{listed(problems, '; ')} Nothing has been changed."
    )
