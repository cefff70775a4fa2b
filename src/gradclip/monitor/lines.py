"""Steps as lines of JSON, one per step. JSON has no NaN or infinity: they are the strings "nan", "inf", "-inf"."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gradclip.monitor.records import Step
from gradclip.monitor.states import layers_of, step_of


def to_line(step: Step) -> str:
    """Return one step as a line, without the newline."""
    told: dict[str, object] = {
        "step": step.step,
        "norm": step.norm,
        "max_norm": step.max_norm,
        "coefficient": step.coefficient,
        "clipped": step.clipped,
        "skipped": step.skipped,
        "finite": step.finite,
    }
    if step.layers is not None:
        told["layers"] = dict(zip(step.layers.names, step.layers.norms.tolist(), strict=True))
    return json.dumps(_plain(told))


def from_lines(lines: Iterable[str]) -> Iterator[Step]:
    """Yield the steps. Raises a ValueError that names the first line that is not a step."""
    names: dict[tuple[str, ...], tuple[str, ...]] = {}
    before = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step = _step(json.loads(line), names)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not a step saved by a Monitor, got {line.strip():.80}") from error
        if step.step <= before:
            raise ValueError(f"line {number} is step {step.step}, after step {before}. Steps must be in their order.")
        before = step.step
        yield step


def _step(told: Mapping[str, Any], known: dict[tuple[str, ...], tuple[str, ...]]) -> Step:
    layers = None
    if "layers" in told:
        names = tuple(told["layers"])
        layers = layers_of(known.setdefault(names, names), [_number(norm) for norm in told["layers"].values()])
    return step_of(told["step"], _number(told["norm"]), _number(told["max_norm"]), told["skipped"], layers=layers)


def _number(told: object) -> object:
    return float(told) if told in ("nan", "inf", "-inf") else told


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
