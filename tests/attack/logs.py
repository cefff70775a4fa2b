"""Logs in random formats, spellings and separators: what is read is what was written, or an error."""

import csv
import gzip
import io
import json
import tempfile
from pathlib import Path

from gradclip._src.logs.read import read
from gradclip._src.logs.rows import LogError
from gradclip._src.logs.summary import Summary

NORMS = ("grad_norm", "train/grad_norm", "Grad Norm", "gradient_norm", "gnorm", "grad-norm")
STEPS = ("step", "global_step", "iteration")
FORMATS = ("table", "lines", "document", "columns", "state", "text")


def attack(rng):
    """Write the same run in some way, and read it back."""
    rows = _run(rng)
    kind = str(rng.choice(FORMATS))
    decimal = "," if kind in ("table", "text") and rng.integers(4) == 0 else "."
    content = WRITERS[kind](rng, rows, decimal)
    data = content.encode(str(rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16"])))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(gzip.compress(data) if rng.integers(3) == 0 else data)
        try:
            log = read(path)
        except LogError:
            assert decimal == ",", content[:300]
            return
    found = [(row.step, row.norm) for row in log.rows]
    expected = [(row["step"], row["norm"]) for row in rows]
    if decimal == ",":
        assert set(found) <= set(expected), (found, content[:300])
        assert len(found) == len(expected) or log.notes, content[:300]
        return
    assert found == expected, (kind, found[:3], expected[:3], content[:300])
    clipped = sum(row["clipped"] < row["norm"] for row in rows)
    if kind != "text":
        assert Summary.of(log).counts.num_clipped == clipped, (kind, clipped, content[:300])


def _run(rng):
    """Return the rows of a run that a callback of gradclip has clipped to one threshold."""
    count, threshold = int(rng.integers(2, 30)), float(rng.choice([0.25, 0.5, 1.0, 2.0]))
    first, gap = int(rng.integers(0, 50)), int(rng.integers(1, 20))
    norms = [float(f"{size:.4g}") for size in 10.0 ** rng.uniform(-2, 5, count)]
    return [
        {
            "step": first + gap * place,
            "loss": round(float(rng.uniform(0, 3)), 3),
            "norm": norm,
            "clipped": min(norm, threshold),
        }
        for place, norm in enumerate(norms)
    ]


def _entries(rng, rows):
    norm, step = str(rng.choice(NORMS)), str(rng.choice(STEPS))
    after = norm.rpartition("/")[0]
    clipped = f"{after}/grad_norm_clipped" if after else "grad_norm_clipped"
    return [{step: row["step"], "loss": row["loss"], norm: row["norm"], clipped: row["clipped"]} for row in rows]


def _table(rng, rows, decimal):
    separator = ";" if decimal == "," else str(rng.choice([",", ";", "\t"]))
    entries = _entries(rng, rows)
    written = io.StringIO()
    quoting = csv.QUOTE_ALL if rng.integers(2) else csv.QUOTE_MINIMAL
    table = csv.writer(written, delimiter=separator, quoting=quoting, lineterminator=str(rng.choice(["\n", "\r\n"])))
    table.writerow(entries[0])
    table.writerows([str(x).replace(".", decimal) for x in entry.values()] for entry in entries)
    return written.getvalue()


def _text(rng, rows, decimal):
    between = str(rng.choice([" | ", ", ", "  ", " - "] if decimal == "." else [" | ", "  "]))
    says = str(rng.choice([": ", "=", " = "]))
    prefix = str(rng.choice(["", "2026-01-02 03:04:05 | INFO | trainer:step:12 - ", "INFO:root:", "[rank0] "]))
    lines = (
        prefix
        + between.join((f"step{says}{row['step']}", f"loss{says}{row['loss']}", f"grad_norm{says}{row['norm']!r}"))
        for row in rows
    )
    return "".join(line.replace(".", decimal) if decimal == "," else line for line in (f"{one}\n" for one in lines))


WRITERS = {
    "table": _table,
    "text": _text,
    "lines": lambda rng, rows, _: "".join(f"{json.dumps(one)}\n" for one in _entries(rng, rows)),
    "document": lambda rng, rows, _: json.dumps(_entries(rng, rows), indent=int(rng.integers(3)) or None),
    "columns": lambda rng, rows, _: json.dumps(
        {name: [entry[name] for entry in entries] for entries in [_entries(rng, rows)] for name in entries[0]}
    ),
    "state": lambda rng, rows, _: json.dumps(
        {"log_history": [{"learning_rate": 0.1, "epoch": 1.0, **one} for one in _entries(rng, rows)], "global_step": 9}
    ),
}
