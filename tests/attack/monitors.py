"""Hostile states, files, names and values for a monitor: one clear error and an unchanged monitor, or all works."""

import copy
import json
import math
import tempfile
import warnings
from pathlib import Path

import numpy as np

import gradclip

NAMES = ("w", "layers.0.bias", "", "\udc80", "a\nb", "\x00", "$x$", "층", "[0]['k']", "a" * 300, "￾", "<svg>", "...")
HOSTILE = (
    *(None, True, "1", "nan", "x", b"1", 1.5, -1, 0, 10**400, 2**60, math.nan, math.inf, -math.inf, 1e300, 1j),
    *([], [1], [[]], {}, {"a": 1}, (1, 2), np.ones(2), np.array("x"), np.float32(3), np.array(2), object(), float),
)


def attack(rng):
    """Draw a monitor, and spoil its state, its file, or what it records."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "at step .* clipping multiplied the gradients")
        monitor = drawn(rng)
        [spoil_state, spoil_file, spoil_record][int(rng.integers(3))](rng, monitor)
        read(monitor)
        if rng.integers(40) == 0:
            shown(monitor)


def drawn(rng):
    monitor = gradclip.Monitor(capacity=int(rng.integers(1, 12)), fetch_every=int(rng.integers(1, 9)))
    for _ in range(int(rng.integers(0, 6))):
        count = int(rng.integers(0, 4))
        norms = np.where(
            rng.random(count) < 0.2, rng.choice([math.nan, math.inf, 0.0]), 10 ** rng.uniform(-40, 300, count)
        )
        names = rng.permutation(NAMES)[: int(rng.integers(0, 4))].tolist()
        layers = dict.fromkeys(names, norms * 0.5) if rng.integers(2) else None
        threshold = rng.choice([0.0, 1.0, math.inf])
        monitor.record(
            norms, threshold, layer_norms=layers, nonfinite=str(rng.choice(["propagate", "raise", "zero", "drop"]))
        )
        if rng.integers(2):
            monitor.record(2.0, threshold, layer_norms=np.ones(len(names)), names=names)
    return monitor


def read(monitor):
    """Read all numbers, and have the state and the file go through their formats."""
    told = repr(monitor.state_dict())
    text = str((monitor, monitor.last, monitor.columns, monitor.layers, monitor.top_layers, monitor.advise()))
    again = gradclip.Monitor(capacity=20)
    again.load_state_dict(monitor.state_dict())
    assert repr(again.state_dict()) == told, text
    with tempfile.TemporaryDirectory() as folder:
        monitor.save(Path(folder) / "steps")
        loaded = gradclip.Monitor.load(Path(folder) / "steps")
    assert repr(loaded.records) == repr(monitor.records)


def shown(monitor):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        monitor.report(Path(folder) / "page.html", title="\udc80 \x07")
        monitor.plot(Path(folder) / "picture.png")


def refused(monitor, call, *kinds):
    """Call; if it raises, that must be an error of these kinds that has changed nothing."""
    before = repr(monitor.state_dict())
    try:
        call()
    except kinds as error:
        said = str(error)
        assert len(said) > 30, said
        assert repr(monitor.state_dict()) == before


def spoil_state(rng, monitor):
    state = spoiled(rng, monitor.state_dict())
    refused(monitor, lambda: monitor.load_state_dict(state), ValueError)


def spoiled(rng, value):
    """Return lists and numbers of which one, somewhere, is another."""
    if isinstance(value, dict | list) and value and rng.integers(8):
        changed = copy.copy(value)
        key = list(value)[int(rng.integers(len(value)))] if isinstance(value, dict) else int(rng.integers(len(value)))
        changed[key] = spoiled(rng, value[key])
        return changed
    return HOSTILE[int(rng.integers(len(HOSTILE)))]


def spoil_file(rng, monitor):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        monitor.save(path)
        lines = path.read_bytes().splitlines() or [b"{}"]
        place = int(rng.integers(len(lines)))
        lines[place] = spoiled_line(rng, lines[place])
        path.write_bytes(b"\n".join(lines))
        refused(monitor, lambda: read(gradclip.Monitor.load(path)), ValueError)


def spoiled_line(rng, line):
    kind = int(rng.integers(4))
    if kind == 0:
        return line[: int(rng.integers(len(line)))]
    if kind == 1:
        return bytes(rng.permutation(np.frombuffer(line, np.uint8)))
    if kind == 2:
        return [b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b'{"step": 1e999}', line + line][int(rng.integers(5))]
    return json.dumps(spoiled(rng, json.loads(line)), default=repr).encode()


def spoil_record(rng, monitor):
    given = {"norm": 2.0, "max_norm": 1.0, "layer_norms": np.ones(2), "names": ["a", "b"], "skip_above": 5.0}
    names = rng.permutation(list(given))[: int(rng.integers(1, 3))]
    given |= {name: HOSTILE[int(rng.integers(len(HOSTILE)))] for name in names.tolist()}
    refused(monitor, lambda: monitor.record(**given), ValueError, TypeError)
