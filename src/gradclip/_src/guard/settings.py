"""What a guard is asked for, checked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from gradclip._src.annotations import Meshes, OnMistake, ProcessGroups
from gradclip._src.core.norms import Order
from gradclip._src.words import shown, typed

if TYPE_CHECKING:
    from gradclip._src.guard.ranks import Ranks


@runtime_checkable
class Handle(Protocol):
    """What `clip_at_step` returns."""

    norm: Any
    max_norm: Any


@dataclass(frozen=True)
class Settings:
    """How often to look, at which norm, of which processes, and what to do about a mistake."""

    every: int
    order: Order
    on_mistake: OnMistake
    stop_after: int | None
    process_group: ProcessGroups
    mesh: Meshes
    replicas: Any

    def __post_init__(self) -> None:
        _check_count("every", self.every, "the number of steps from one look to the next")
        if self.stop_after is not None:
            _check_count("stop_after", self.stop_after, "the number of skipped steps in a row that stops, or None")
        if self.on_mistake not in ("warn", "raise"):
            raise ValueError(f"on_mistake must be 'warn' or 'raise', got {shown(self.on_mistake)}.")

    def is_look(self, step: int) -> bool:
        """Say whether to look at a step: the first two, and each of a multiple of `every`."""
        return step <= 2 or step % self.every == 0

    def ranks(self, parameters: Sequence[Any]) -> "Ranks | None":
        """Return the processes to compare; None if there are no others, or if they hold different parameters."""
        from gradclip._src.backends import among_several, any_distributed

        named = self.process_group is not None or self.mesh is not None
        if self.replicas is False or named or any_distributed(parameters) or not among_several():
            return None
        from gradclip._src.guard.ranks import Ranks  # imports torch.distributed, which may be missing

        return Ranks(None if self.replicas in (None, True) else self.replicas, parameters)


def _check_count(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {meaning}: an integer, got {typed(value)}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}. It is {meaning}.")


def seems_a_handle(max_norm: object) -> TypeGuard[Handle]:
    """Say whether a threshold is what `clip_at_step` returns: it has the norm and the threshold of a step."""
    return hasattr(max_norm, "norm") and hasattr(max_norm, "max_norm")


def as_number(threshold: object) -> float:
    """Return a threshold as a number; inf if it is None, or not one number."""
    try:
        number = math.inf if threshold is None else float(threshold)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.inf
    return math.inf if math.isnan(number) else number
