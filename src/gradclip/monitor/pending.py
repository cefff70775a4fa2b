"""Steps whose values have not been looked at: they may lie on an accelerator, which nobody waits for yet."""

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gradclip.backends.conversions import fetched
from gradclip.backends.registry import framework_of, known
from gradclip.core.nonfinite import SKIP, Nonfinite
from gradclip.monitor.records import Layers, Step
from gradclip.tree import flatten
from gradclip.typing import Policy


class Pending(NamedTuple):
    """What a call knew of a step, or a vector of what it knew of several, as scalars of any framework."""

    norm: Any
    max_norm: Any
    names: tuple[str, ...]
    layers: Sequence[Any]  # the norm of each, or one vector of them all
    skip_above: float
    skips: bool  # steps whose norm is not finite

    @classmethod
    def of(
        cls, norm: object, max_norm: object, layer_norms: object, nonfinite: Policy, names: tuple[str, ...] | None
    ) -> "Pending":
        """Check what is to be recorded. Raises TypeError for what is no array of numbers, or a traced one."""
        threshold, skip_above = max_norm, math.inf
        if not known(max_norm) and hasattr(max_norm, "threshold"):
            threshold, skip_above = max_norm.threshold, float(getattr(max_norm, "skip_above", math.inf))
        flat = None if layer_norms is None or names is not None else flatten(layer_norms)
        layers: Sequence[Any] = () if layer_norms is None else [layer_norms]
        if flat is not None:
            layers, names = flat.leaves, tuple(flat.paths())
        _check("norm", norm)
        _check("max_norm", threshold, norm)
        if flat is not None:
            for layer in layers:
                _check("layer_norms", layer, norm)
        skips = Nonfinite.named(nonfinite) is SKIP
        return cls(norm, threshold, _dotted(names or ()), layers, skip_above, skips)

    @property
    def vectors(self) -> list[Any]:
        """All that has to be fetched."""
        return [self.norm, self.max_norm, *self.layers]


def resolved(pending: Sequence[Pending], first: int) -> Iterator[Step]:
    """Fetch the values of steps, all together, and yield the steps, numbered from `first`."""
    numbers = iter(fetched([value for one in pending for value in one.vectors]))
    for one in pending:
        norms, max_norms, *layers = [next(numbers) for _ in one.vectors]
        several = max_norms.tolist() * (len(norms) if len(max_norms) == 1 else 1)
        rows = _rows(layers, len(norms), len(one.names))
        for norm, max_norm, row in zip(norms.tolist(), several, rows, strict=True):
            skipped = one.skips if not math.isfinite(norm) else norm > one.skip_above * max_norm
            yield Step(first, norm, max_norm, skipped, None if row is None else Layers(one.names, row))
            first += 1


def _rows(layers: Sequence[np.ndarray], steps: int, count: int) -> Sequence[np.ndarray | None]:
    """Return the norms of layers for each of some steps."""
    if not layers:
        return [None] * steps
    table = np.concatenate(layers).reshape(count, steps).T
    return list(table.astype(np.float32))


# Kept, so that steps share the names of their layers, which are the same at each.
@lru_cache(maxsize=64)
def _dotted(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return `['layer'][0]` as layer.0, which leaves a picture more room."""
    shorter = [re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).strip(".") for path in paths]
    return tuple(name or "all" for name in shorter)


def _check(name: str, value: object, like: object = None) -> None:
    if not known(value):
        raise TypeError(
            f"{name} must be a number or an array, got {value!r:.80} of type {type(value).__name__}. "
            "Pass what the clipping call returned."
        )
    framework = framework_of(value)
    if framework is not None and framework.is_traced(value):
        raise TypeError(
            f"{name} is traced: it has no value yet. Return it from the compiled function, and record it outside."
        )
    shape, wanted = _shape(value), _shape(like)
    if len(shape) > 1:
        raise TypeError(f"{name} must be a scalar, or a vector with one entry for each step, got shape {shape}.")
    if like is not None and shape != wanted and (name != "max_norm" or shape):
        raise ValueError(f"{name} must have the shape of norm, {wanted}, got {shape}: an entry for each step.")


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
