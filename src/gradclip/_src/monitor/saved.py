"""What a monitor saves and reads again: its steps as lines of JSON, one per step, or its state as lists and numbers."""

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.json_text import from_json, to_json
from gradclip._src.monitor.records import Counts, LayerOfSpike, Layers, Spike, Step, described, nan_or, narrowed
from gradclip._src.words import shown

_NUMBERS = ("norm", "level", "loss", "max_norm")
_FLAGS = ("skipped", "raised")


def plain_of(spike: Spike) -> dict[str, Any]:
    """Return a spike as dicts, lists, numbers and strings.

    A context of anything else is described: an array becomes a list, other objects what `repr` says of them.
    """
    told = {name: getattr(spike, name) for name in ("step", *_NUMBERS, *_FLAGS)}
    return told | {"context": _plain(spike.context), "layers": [list(layer) for layer in spike.layers]}


def spike_of(plain: Mapping[str, Any]) -> Spike:
    """Read a spike. Raises whatever reading something else raises."""
    norm, level, loss, max_norm = (float(plain[name]) for name in _NUMBERS)
    skipped, raised = (bool(plain[name]) for name in _FLAGS)
    layers = tuple(map(_layer, plain["layers"]))
    return Spike(int(plain["step"]), norm, level, loss, plain["context"], layers, max_norm, skipped, raised)


def _layer(row: Sequence[Any]) -> LayerOfSpike:
    name, norm, share, times, since = row
    return LayerOfSpike(str(name), float(norm), float(share), float(times), int(since))


def _plain(value: object) -> Any:
    try:
        return _listed(value)
    except Exception:  # such as an array that was deleted, or a list that holds itself: a checkpoint is not lost for it
        return described(value)


def _listed(value: object) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_listed(item) for item in value]
    if hasattr(value, "tolist"):
        return _listed(value.tolist())
    return described(value)


_OF_A_LINE = ("step", "norm", "max_norm", "coefficient", "clipped", "skipped", "finite")
_OF_A_STATE = ("step", "norm", "max_norm", "skipped")
_MOST = 2**53  # a number of steps that float64 holds


class State(NamedTuple):
    """The kept steps, the counts of all steps, the number of calls, and the spikes; None for those among the steps."""

    steps: Sequence[Step]
    counts: Counts
    calls: int
    spikes: Sequence[Spike] | None

    def plain(self) -> dict[str, Any]:
        """Return the state as lists and numbers."""
        steps = self.steps
        names = list(dict.fromkeys(step.layers.names for step in steps if step.layers))
        places = {one: place for place, one in enumerate(names)}
        return {
            "counts": list(self.counts),
            "calls": self.calls,
            "spikes": [plain_of(spike) for spike in self.spikes or ()],
            **{name: [getattr(step, name) for step in steps] for name in _OF_A_STATE},
            "loss": [step.loss for step in steps],
            "names": [list(one) for one in names],
            "layers": [[places[s.layers.names], *s.layers.norms.tolist()] if s.layers else [] for s in steps],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "State":
        """Read a state. Raises ValueError if `plain` did not return it."""
        try:
            names = [tuple(one) for one in plain["names"]]
            losses = plain["loss"] if "loss" in plain else [math.nan] * len(plain["step"])
            rows = zip(*(plain[key] for key in _OF_A_STATE), losses, plain["layers"], strict=True)
            steps = [step_of(*row, layers=_layers(names, layers)) for *row, layers in rows]
            counts, calls = Counts(*map(whole, plain["counts"])), whole(plain["calls"])
            _check(steps, counts)
            spikes = [spike_of(one) for one in plain["spikes"]] if "spikes" in plain else None
        except Exception as error:  # whatever reading it raises
            raise ValueError(
                f"this is not the state of a Monitor: {_why(error)}. Pass the result of its state_dict()."
            ) from error
        return cls(steps, counts, calls, spikes)


def groups_of(plain: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the states of groups in a state. Raises ValueError if one of them is not a state."""
    groups = plain.get("groups", {})
    if not isinstance(groups, Mapping) or not all(isinstance(name, str) for name in groups):
        raise ValueError(
            f"this is not the state of a Monitor: groups must map names to states, got {shown(groups)}. Pass the "
            "result of its state_dict()."
        )
    for one in groups.values():
        State.of(one)
    return {name: {key: value for key, value in one.items() if key != "groups"} for name, one in groups.items()}


def to_line(step: Step) -> str:
    """Return one step as a line, without the newline."""
    told: dict[str, object] = {name: getattr(step, name) for name in _OF_A_LINE}
    if not math.isnan(step.loss):
        told["loss"] = step.loss
    if step.layers is not None:
        told["layers"] = dict(zip(step.layers.names, step.layers.norms.tolist(), strict=True))
    return to_json(told)


def from_lines(lines: Iterable[str]) -> Iterator[Step]:
    """Yield the steps. Raises a ValueError that names the first line that is not a step."""
    names: dict[tuple[str, ...], tuple[str, ...]] = {}
    before = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step = _step(from_json(line), names)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not a step saved by a Monitor, got {line.strip():.80}") from error
        if step.step <= before:
            raise ValueError(f"line {number} is step {step.step}, after step {before}. Steps must be in their order.")
        before = step.step
        yield step


def step_of(
    step: object, norm: object, max_norm: object, skipped: object, loss: object = math.nan, *, layers: Layers | None
) -> Step:
    """Return a step of checked values. Raises ValueError for one that no monitor records."""
    skips = _item(skipped)
    if not isinstance(skips, bool):
        raise ValueError(f"skipped must be True or False, got {shown(skips)}")
    number = whole(step)
    if not number:
        raise ValueError("steps are numbered from 1, got 0")
    return Step(number, real(norm), real(max_norm), skips, layers, nan_or(real(loss)))


def layers_of(names: tuple[Any, ...], norms: Sequence[Any]) -> Layers:
    """Return checked norms of layers. Raises ValueError unless each has a name of its own."""
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("the names of layers must be different strings")
    if len(names) != len(norms):
        raise ValueError(f"each layer needs one name and one norm, got {len(names)} names and {len(norms)} norms")
    return Layers(names, narrowed(np.array([real(norm) for norm in norms])))


def real(value: object) -> float:
    """Return a number as a float. Raises ValueError for anything else, or if no float holds it."""
    number = _item(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ValueError(f"a norm, threshold or loss must be a number, got {shown(number)}")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"a norm, threshold or loss must fit a float, got {_shown(number)}") from None


def whole(value: object) -> int:
    """Return a whole number from 0 to 2**53. Raises ValueError for anything else."""
    number = _item(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or int(number) not in range(_MOST + 1):
        raise ValueError(f"a number of steps must be a whole number from 0 to 2**53, got {_shown(number)}")
    return int(number)


def _step(told: Mapping[str, Any], known: dict[tuple[str, ...], tuple[str, ...]]) -> Step:
    layers = None
    if "layers" in told:
        names = tuple(told["layers"])
        layers = layers_of(known.setdefault(names, names), [*told["layers"].values()])
    loss = told.get("loss", math.nan)
    return step_of(told["step"], told["norm"], told["max_norm"], told["skipped"], loss, layers=layers)


def _layers(names: Sequence[tuple[Any, ...]], row: Sequence[Any]) -> Layers | None:
    return layers_of(names[whole(row[0])], row[1:]) if len(row) else None


def _check(steps: Sequence[Step], counts: Counts) -> None:
    """Raise ValueError unless the numbers of the steps rise and the counts are at least theirs."""
    for before, after in pairwise(steps):
        if before.step >= after.step:
            raise ValueError(f"the numbers of steps must rise, got {after.step} after {before.step}")
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
    return shown(number)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__} ({shown(str(error))})"
