"""What `clip_at_step` is asked for besides the threshold."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from gradclip._src.annotations import Integers, Meshes, Ord, ProcessGroups, StepPolicy, Where
from gradclip._src.words import shown

Fused: TypeAlias = Literal["auto"] | bool
"""Whether a fused optimizer clips as it reads the gradients: where it can, always, or never."""


def each_threshold(max_norm: object) -> tuple[Any, ...]:
    """Return what is in the place of each threshold: those of patterns of names, or the one."""
    return tuple(max_norm.values()) if isinstance(max_norm, Mapping) else (max_norm,)


class Steps(Protocol):
    """An optimizer, what is wrapped around one, or a training engine."""

    @property
    def step(self) -> Any: ...


class Asked(NamedTuple):
    """The arguments as they were passed, not yet checked: an error must reach all processes."""

    fused: Fused
    ord: Ord
    nonfinite: StepPolicy
    process_group: ProcessGroups
    mesh: Meshes
    where: Where
    integers: Integers

    def check(self) -> None:
        """Raise a ValueError for settings that no optimizer can follow."""
        if not (self.fused is True or self.fused is False or self.fused == "auto"):
            raise ValueError(
                f"fused must be 'auto', True or False, got {shown(self.fused)}. 'auto' clips within the step of a "
                "fused optimizer where that is possible, True demands it, False clips before each step."
            )
