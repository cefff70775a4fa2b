"""What a private run saves: plain numbers, which files of any kind hold, and the checks of what is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradclip._src.private.run.accounting import Releases, checked_multiplier
from gradclip._src.private.run.batches import PoissonBatches
from gradclip._src.private.sums.settings import as_count, as_number
from gradclip._src.words import shown, typed

_PART = ("rate", "releases", "noise_multiplier", "overflow")


def saved_parts(parts: tuple[Releases, ...]) -> list[dict[str, float]]:
    """Return parts of a run in plain numbers."""
    return [dict(zip(_PART, part, strict=True)) for part in parts]


def loaded_parts(state: object) -> tuple[Releases, ...]:
    """Return the parts of a run in a saved state. Raises TypeError or ValueError if it is none."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() of a PrivateRun returned, got {typed(state)}.")
    parts = state.get("parts")
    if not isinstance(parts, list | tuple) or not all(isinstance(one, Mapping) for one in parts):
        raise ValueError(f"state must hold 'parts', as state_dict() of a PrivateRun does, got {shown(state)}.")
    return tuple(_part(one) for one in parts)


def _part(saved: Mapping[str, Any]) -> Releases:
    if missing := [name for name in _PART if name not in saved]:
        raise ValueError(f"a part of the state lacks {missing[0]!r}: it is not what state_dict() returned.")
    rate, overflow = (as_number(name, saved[name]) for name in ("rate", "overflow"))
    if not (0 < rate <= 1 and 0 <= overflow <= 1):
        raise ValueError(
            f"a part of the state has rate {rate!r} and overflow {overflow!r}, which are no probabilities."
        )
    multiplier = checked_multiplier(saved["noise_multiplier"])
    return Releases(rate, as_count("releases", saved["releases"]), multiplier, overflow)


def settings_of(batches: PoissonBatches) -> dict[str, Any]:
    """Return what tells batches from others."""
    return {name: getattr(batches, name) for name in ("n", "rate", "steps", "pad_to")}


def saved_batches(batches: PoissonBatches) -> dict[str, Any]:
    """Return the settings of batches and the state of their generator, in plain numbers."""
    generator = getattr(getattr(batches, "seed", None), "bit_generator", None)
    return settings_of(batches) | {"generator": None if generator is None else _plain(generator.state)}


def check_same(saved: object, own: Mapping[str, object]) -> None:
    """Raise a ValueError if a saved run has other settings than this one."""
    given = saved if isinstance(saved, Mapping) else {}
    for name, value in own.items():
        if given.get(name) != value:
            raise ValueError(
                f"the state is of a run with {name}={given.get(name)!r}, and this one has {value!r}. Make the run as "
                "it was made, or go on with other settings by PrivateRun(..., state=state)."
            )


def _plain(value: Any) -> Any:
    """Return the state of a generator with lists in place of arrays."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
