"""The state of a monitor as lists and numbers, and steps from what was saved, checked."""

import numbers
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradclip.monitor.records import Counts, Layers, Step, narrowed

_COLUMNS = ("step", "norm", "max_norm", "skipped", "layers")
_MOST = 2**53  # a number of steps that float64 holds


class State(NamedTuple):
    """The kept steps, the counts of all steps, and the number of calls."""

    steps: Sequence[Step]
    counts: Counts
    calls: int

    def plain(self) -> dict[str, Any]:
        """Return the state as lists and numbers."""
        steps = self.steps
        names = list(dict.fromkeys(step.layers.names for step in steps if step.layers))
        places = {one: place for place, one in enumerate(names)}
        return {
            "counts": list(self.counts),
            "calls": self.calls,
            "step": [step.step for step in steps],
            "norm": [step.norm for step in steps],
            "max_norm": [step.max_norm for step in steps],
            "skipped": [step.skipped for step in steps],
            "names": [list(one) for one in names],
            "layers": [[places[s.layers.names], *s.layers.norms.tolist()] if s.layers else [] for s in steps],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "State":
        """Read a state. Raises ValueError if `plain` did not return it."""
        try:
            names = [tuple(one) for one in plain["names"]]
            rows = zip(*(plain[key] for key in _COLUMNS), strict=True)
            steps = [step_of(*row, layers=_layers(names, layers)) for *row, layers in rows]
            counts, calls = Counts(*map(whole, plain["counts"])), whole(plain["calls"])
            _check_counts(counts, in_order(steps))
        except Exception as error:  # whatever reading it raises
            raise ValueError(
                f"this is not the state of a Monitor: {_why(error)}. Pass the result of its state_dict()."
            ) from error
        return cls(steps, counts, calls)


def step_of(step: object, norm: object, max_norm: object, skipped: object, *, layers: Layers | None) -> Step:
    """Return a step of checked values. Raises ValueError for one that no monitor records."""
    skips = _item(skipped)
    if not isinstance(skips, bool):
        raise ValueError(f"skipped must be True or False, got {skips!r:.80}")
    number = whole(step)
    if not number:
        raise ValueError("steps are numbered from 1, got 0")
    return Step(number, real(norm), real(max_norm), skips, layers)


def layers_of(names: tuple[Any, ...], norms: Sequence[Any]) -> Layers:
    """Return checked norms of layers. Raises ValueError unless each has a name of its own."""
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("the names of layers must be different strings")
    if len(names) != len(norms):
        raise ValueError(f"each layer needs one name and one norm, got {len(names)} names and {len(norms)} norms")
    return Layers(names, narrowed(np.array([real(norm) for norm in norms])))


def in_order(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps. Raises ValueError unless their numbers rise."""
    for before, after in pairwise(steps):
        if before.step >= after.step:
            raise ValueError(f"the numbers of steps must rise, got {after.step} after {before.step}")
    return steps


def real(value: object) -> float:
    """Return a number as a float. Raises ValueError for anything else, or if no float holds it."""
    number = _item(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ValueError(f"a norm or threshold must be a number, got {number!r:.80}")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"a norm or threshold must fit a float, got {_shown(number)}") from None


def whole(value: object) -> int:
    """Return a whole number from 0 to 2**53. Raises ValueError for anything else."""
    number = _item(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or int(number) not in range(_MOST + 1):
        raise ValueError(f"a number of steps must be a whole number from 0 to 2**53, got {_shown(number)}")
    return int(number)


def _layers(names: Sequence[tuple[Any, ...]], row: Sequence[Any]) -> Layers | None:
    return layers_of(names[whole(row[0])], row[1:]) if len(row) else None


def _check_counts(counts: Counts, steps: Sequence[Step]) -> None:
    kept = Counts().plus(steps)
    if any(few < least for few, least in zip(counts, kept, strict=True)) or max(counts) > counts.steps:
        raise ValueError(f"counts must be those of all steps, got {tuple(counts)} for {tuple(kept)} steps kept")


def _item(value: object) -> Any:
    """Return the Python number in a scalar array, into which some checkpoint formats turn numbers."""
    return value.item() if hasattr(value, "item") else value


def _shown(number: object) -> str:
    """Describe a value. Python refuses to print very long whole numbers."""
    if isinstance(number, int) and abs(number) > _MOST:
        return f"one of {number.bit_length()} bits"
    return f"{number!r:.80}"


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__} ({error!s:.80})"
