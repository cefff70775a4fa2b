"""What `clip_at_step` is asked for besides the threshold."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

from gradclip._src.annotations import Integers, Meshes, Ord, ProcessGroups, StepPolicy, Threshold, UnitAxis, Where
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Order
from gradclip._src.thresholds.holder import AdaptiveThreshold
from gradclip._src.words import shown

Scope: TypeAlias = Literal["global", "layer", "unit", "value", "agc"]
"""Which elements share a norm: all, those of a layer, those of a unit; none; or of a unit, beside its weights."""

Fused: TypeAlias = Literal["auto"] | bool
"""Whether a fused optimizer clips as it reads the gradients: where it can, always, or never."""


def each_threshold(max_norm: object) -> tuple[Any, ...]:
    """Return what is in the place of each threshold: those of patterns of names, or the one."""
    return tuple(max_norm.values()) if isinstance(max_norm, Mapping) else (max_norm,)


@runtime_checkable
class Steps(Protocol):
    """An optimizer, what is wrapped around one, or a training engine."""

    @property
    def step(self) -> Any: ...


class Asked(NamedTuple):
    """The arguments as they were passed, not yet checked: an error must reach all processes."""

    fused: Fused
    scope: Scope
    eps: Threshold | None
    unit_axis: UnitAxis
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
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope must be one of {', '.join(map(repr, get_args(Scope)))}, got {shown(self.scope)}.")
        if self.eps is not None and self.scope != "agc":
            raise ValueError(
                f"eps is the lower limit for the norm of weights, which only scope='agc' measures, got "
                f"scope={self.scope!r}. Leave eps out."
            )
        if self.unit_axis is not None and self.scope not in ("unit", "agc"):
            raise ValueError(
                f"unit_axis is the axis that indexes units, which only scope='unit' and scope='agc' clip, got "
                f"scope={self.scope!r}. Leave unit_axis out."
            )

    def check_scope(self, max_norm: object, monitor: object, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise a ValueError for what a scope other than "global" cannot follow."""
        if self.scope == "global":
            return
        check_scoped(self.scope, max_norm)
        check_no_thresholds(self.scope, groups)
        if self.scope == "value" and Order.parse(self.ord).p != 2:
            raise ValueError(f"scope='value' measures no norm, so ord={self.ord!r} has no effect. Leave ord out.")
        if self.scope == "value" and monitor is not None:
            raise ValueError(
                "a monitor records norms, and scope='value' measures none. Leave monitor out, or record "
                "gradclip.grad_norm(parameters) before each step."
            )
        if self.fused is True:
            raise ValueError(
                f"a fused step divides all gradients by one number, so it cannot clip with scope={self.scope!r}. Leave "
                "fused=True out."
            )
        policy = Nonfinite.of_steps(self.nonfinite)
        if self.scope == "value" and not (policy.spoils or policy.blanks):
            raise ValueError(
                f"scope='value' leaves NaN as it is, so nonfinite={self.nonfinite!r} has no effect. Leave it out, or "
                "pass 'skip', which skips the step."
            )
        if self.scope == "value" and not (self.process_group is None and self.mesh is None):
            raise ValueError(
                "scope='value' clips each element, which needs no other process. Leave process_group and mesh out."
            )


def check_no_thresholds(scope: Scope, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError if a parameter group has a threshold of its own."""
    if any("max_norm" in group for group in groups):
        raise ValueError(
            f"a parameter group has 'max_norm', a threshold of its own, which clip_at_step does not read with "
            f"scope={scope!r}. Leave it out, or make an optimizer for each threshold."
        )


def check_scoped(scope: Scope, max_norm: object) -> None:
    """Raise a ValueError for thresholds by patterns of names, or that follow norms which a scope does not measure."""
    if isinstance(max_norm, AdaptiveThreshold) and scope == "layer":
        max_norm._check_takes_layers()
    elif isinstance(max_norm, AdaptiveThreshold | Mapping):
        named = isinstance(max_norm, Mapping)
        what, other = ("patterns of names", "") if named else ("an AdaptiveThreshold", "scope='layer' or ")
        raise ValueError(
            f"scope={scope!r} takes one number as max_norm, got {what}. Pass a number, or {other}scope='global'."
        )
