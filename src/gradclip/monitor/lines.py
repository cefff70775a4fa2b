"""Steps as lines of JSON, one per step. JSON has no NaN or infinity: they are the strings "nan", "inf", "-inf"."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gradclip.monitor.records import Layers, Step, narrowed


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
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _step(json.loads(line), names)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not a step saved by a Monitor, got {line.strip():.80}") from error


def _step(told: Mapping[str, Any], known: dict[tuple[str, ...], tuple[str, ...]]) -> Step:
    layers = None
    if "layers" in told:
        names = tuple(told["layers"])
        norms = narrowed(np.array([float(norm) for norm in told["layers"].values()]))
        layers = Layers(known.setdefault(names, names), norms)
    return Step(int(told["step"]), float(told["norm"]), float(told["max_norm"]), bool(told["skipped"]), layers)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
