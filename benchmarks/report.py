"""The options and the output of the benchmarks."""

import argparse
import json
import math
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CALLS = RESULTS / "calls.json"
CLIPPING = RESULTS / "clipping.json"
PER_EXAMPLE = RESULTS / "per_example.json"
NOISE = RESULTS / "noise.json"
PRIVATE_STEPS = RESULTS / "private_steps.json"
PRIVATE_STEPS_PICTURE = RESULTS.parent.parent / "docs" / "assets" / "private_steps.svg"
SHARDED = RESULTS / "sharded.json"
SHARDED_TRAINERS = RESULTS / "sharded_trainers.json"
SHARDED_JAX = RESULTS / "sharded_jax.json"
COUNTS = RESULTS / "counts.json"
COUNTS_COMPILED = RESULTS / "counts_compiled.json"
COUNTS_EXAMPLES = RESULTS / "counts_examples.json"
COUNTS_JAX = RESULTS / "counts_jax.json"
COUNTS_KERNELS = RESULTS / "counts_kernels.json"
FILES = RESULTS / "files.json"
FOLDED = RESULTS / "folded.json"
SCENARIOS = RESULTS / "scenarios.json"
SCENARIOS_PICTURE = RESULTS / "scenarios.png"
TRAINING = RESULTS / "training.json"
TRAINING_ADVICE = RESULTS / "training_advice.json"
TRAINING_PICTURE = RESULTS / "training.png"
GRAPHS = RESULTS / "graphs.json"
GRAPHS_MLX = RESULTS / "graphs_mlx.json"
GROWTH = RESULTS / "growth.json"
PICTURE = RESULTS / "clipping.png"
GPU_PICTURE = PRIVATE_STEPS_PICTURE.parent / "gpu.svg"
SPEED_PICTURE = PRIVATE_STEPS_PICTURE.parent / "speed.svg"
_UNITS = {2**30: "GB", 2**20: "MB", 2**10: "KB"}


def parser(description, out, less):
    """Return a parser with the options of all measurements; `less` says what --quick measures."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--repeats", type=int, default=30, help="the minimum number of calls of each contender")
    options.add_argument("--seconds", type=float, default=1.0, help="repeat short calls for at least this long")
    options.add_argument("--quick", action="store_true", help=f"{less}; writes only if --out is given")
    options.add_argument("--out", type=Path, help=f"the file to write; results/{out.name} if not given")
    options.set_defaults(usual=out)
    return options


def keep(path, lines, write, **described):
    """Write the counts if asked."""
    if write:
        path.write_text(json.dumps({**described, "lines": lines}, indent=1) + "\n")


def rows(described, measured):
    """Return a row for each contender, with its time as a multiple of gradclip's."""
    ours = next(ms for name, ms in measured.items() if name.startswith("gradclip"))
    return [{**described, "name": name, "ms": ms, "of ours": ms / ours} for name, ms in measured.items()]


def show(label, found):
    for row in found:
        print(f"{label:<43} {row['case']:<12} {row['name']:<32} {row['ms']:10.3f} ms {row['of ours']:7.2f}", flush=True)


def write_measured(results, options, part=False):
    """Write results to the file that was asked for, or to the usual one unless only a part was measured."""
    out = options.out or (None if options.quick or part else options.usual)
    if out:
        write(results, out)


def write(results, out):
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {out}")


def library(name):
    """Return the library of a contender: "torch" for torch.nn.utils.clip_grad_norm_."""
    return re.split("[. ]", name)[0]


def readable_bytes(size):
    """Return a number of bytes as text: "8 KB" for 8192."""
    return next(f"{size // unit:,} {name}" for unit, name in _UNITS.items() if size >= unit)


def rounded(number, figures):
    """Return a positive number with `figures` significant figures, keeping all digits before the point."""
    return f"{number:.{max(0, figures - 1 - math.floor(math.log10(number)))}f}"


def head(*columns):
    """Return the first two lines of a table."""
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n".replace("|  |", "| |")
