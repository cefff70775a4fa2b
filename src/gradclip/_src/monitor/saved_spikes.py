"""Spikes as lists and numbers, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradclip._src.monitor.spike import LayerOfSpike, Spike, described

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


def _plain(value: Any) -> Any:
    try:
        return _listed(value)
    except Exception:  # such as an array that was deleted, or a list that holds itself: a checkpoint is not lost for it
        return described(value)


def _listed(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_listed(item) for item in value]
    if hasattr(value, "tolist"):
        return _listed(value.tolist())
    return described(value)
