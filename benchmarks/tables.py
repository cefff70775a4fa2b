"""Make tables from the benchmarks' results, most of them for the pages. `--write` writes those into the pages."""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_results import measured
from gpu_tables import of_gpu
from private_tables import of_noise, of_private_times
from report import (
    CALLS,
    CLIPPING,
    COUNTS,
    COUNTS_KERNELS,
    FILES,
    FOLDED,
    GPU_PICTURE,
    GRAPHS,
    GRAPHS_MLX,
    NOISE,
    PER_EXAMPLE,
    PRIVATE_STEPS,
    RESULTS,
    SCENARIOS,
    SHARDED_TRAINERS,
    TRAINING,
    TRAINING_ADVICE,
    head,
    library,
    rounded,
)
from rule_tables import of_advice, of_best, of_calm, of_doubt, of_recoveries, of_spikes, of_trainings, of_widths
from speed_tables import of_chosen, of_short

PEER = "torch.nn.utils.clip_grad_norm_"
ROOT = Path(__file__).parent.parent
# Rows that the pages leave out, or all that they show of graphs. The results have the others.
BETWEEN = (" 30 x 64", " 150 x 64")
LIKE_GPT = "one of 250 M"
OF_GRAPHS = ("150 of 64", "ResNet-50")
KINDS = {
    "torch float32": "PyTorch float32",
    "torch bfloat16": "PyTorch bfloat16",
    "torch float16": "PyTorch float16",
    "NumPy float32": "NumPy float32 in place",
    "JAX jitted float32": "`jax.jit`",
    "JAX donated float32": "`jax.jit`, donated",
    "JAX eager float32": "eager JAX",
}


def of_clipping(rows):
    measured = {}
    for row in rows:
        if row["workload"] != LIKE_GPT:
            names = measured.setdefault((row["workload"], row["kind"]), {})
            names.setdefault(row["name"], {})[row["case"]] = row
    return head("ms, not clipped / clipped", "gradclip", "floor", "library replaced", "times as fast") + "".join(
        line for (workload, kind), names in measured.items() for line in _lines(f"{workload}, {KINDS[kind]}", names)
    )


def of_calls(rows):
    """Return a line for each call and what is beside it. Ways to pass the same and sizes in between have no line."""
    lines, found = head("ms, not clipped / clipped", "gradclip", "compared with", "times as fast"), {}
    for row in rows:
        if not row["workload"].startswith("ways") and not any(size in row["workload"] for size in BETWEEN):
            found.setdefault(row["workload"], {}).setdefault(row["name"], {})[row["case"]] = row
    for workload, names in found.items():
        (ours, mine), (other, theirs) = names.items()
        times = [" / ".join(rounded(row["ms"], 3) for row in cases.values()) for cases in (mine, theirs)]
        ratios = " / ".join(rounded(row["of ours"], 2) for row in theirs.values())
        what = ours.removeprefix("gradclip.")
        lines += f"| {workload}: {what} | {times[0]} | {other}: {times[1]} | {ratios} |\n"
    return lines


def of_graphs(rows, other="tf", called="TensorFlow"):
    """Return a line for each workload and mode, with the times of each case: of norms, if measured, and of clipping."""
    cases, found = list(dict.fromkeys(row["case"] for row in rows)), {}
    lines = head(f"ms: {' / '.join(cases)}", "gradclip", called, "times as fast")
    for row in rows:
        if row["workload"] in OF_GRAPHS:
            names = found.setdefault((row["workload"], row["mode"]), {})
            names.setdefault(library(row["name"]), {})[row["case"]] = row
    for (workload, mode), names in found.items():
        ours, theirs = (" / ".join(_time(names[one][case]) for case in cases) for one in ("gradclip", other))
        lines += f"| {workload}, {mode} | {ours} | {theirs} | {' / '.join(_ratio(names[other][c]) for c in cases)} |\n"
    return lines


def _lines(title, names):
    """Return a line for each replaced library. Lines after the first leave repeated cells empty."""
    ours = next(cases for name, cases in names.items() if library(name) == "gradclip")
    floor = f"{_both(names['floor'], 'ms', 3)} " if "floor" in names else ""
    first = f"| {title} | {_both(ours, 'ms', 3)} | {floor}"
    for name, cases in names.items():
        if library(name) not in ("gradclip", "floor"):
            yield f"{first}| {library(name)} {_both(cases, 'ms', 3)} | {_both(cases, 'of ours', 2)} |\n"
            first = "| | | "


def _both(cases, what, figures):
    return " / ".join(rounded(cases[case][what], figures) for case in ("not clipped", "clipped"))


def of_sums(rows):
    """Return a line for each alternative way to add the clipped examples of a batch."""
    lines = head("256 examples", "gradclip, ms", "reads", "the other, ms", "reads", "times as fast")
    for ours, other in _beside(rows):
        if other["name"] != "floor":
            lines += f"| {other['workload']}, {ours['case']} | {_time(ours)} | {rounded(ours['reads'], 2)} "
            lines += f"| {other['name']} {_time(other)} | {rounded(other['reads'], 2)} | {_ratio(other)} |\n"
    return lines


def of_trainers(layouts):
    names = [name for name in layouts[0] if name != "layout"]
    lines = head("layout", *names) + "".join(f"| {' | '.join(row.values())} |\n" for row in layouts)
    right = [str(sum(row[name] == "right" for row in layouts)) for name in names]
    return lines + f"| **right** | {' | '.join(f'**{count}**' for count in right)} |\n"


def of_counts(lines):
    """Return a line for each call, with operations, bytes and memory for each dtype."""
    calls, dtypes = ({line[at]: None for line in lines} for at in (1, 0))
    found = {(dtype, name): f"{ops:,}, {moved:.1f}, {peak:.1f}" for dtype, name, ops, moved, peak, *_ in lines}
    return head("operations, bytes, peak", *dtypes) + "".join(
        f"| {call.replace(PEER, f'`{PEER}`')} | {' | '.join(found[dtype, call] for dtype in dtypes)} |\n"
        for call in calls
    )


def of_kernels(lines):
    """Return a line for each call: launches and bytes, not clipped and clipped, and the host's time."""

    def said(counts):
        launches = " / ".join(dict.fromkeys(f"{number:,}" for number, _ in counts))
        return f"{launches} | {' / '.join(f'{moved:.1f}' for _, moved in counts)}"

    names = "launches", "bytes", "operations, PyTorch", "bytes, PyTorch", "host us", "host us, PyTorch"
    return head("not clipped / clipped", *names) + "".join(
        f"| {call} | {said(ours)} | {said(theirs)} | {' | '.join(f'{one:,.0f}' for one in times)} |\n"
        for call, ours, theirs, times in lines
    )


def of_folded(lines):
    """Return a line for each way to clip, with its time as a multiple of the step alone."""
    calls, cases = ({at(line): None for line in lines} for at in (lambda line: line[2], lambda line: tuple(line[:2])))
    found = {(name, case, call): times for name, case, call, times in lines}
    return head("", *map(", ".join, cases)) + "".join(
        f"| {call} | {' | '.join(f'{found[*case, call]:.2f}' for case in cases)} |\n" for call in calls
    )


def _beside(rows):
    """Return pairs of gradclip's first row and each other row that was measured with it."""
    together = {}
    for row in rows:
        together.setdefault((row["workload"], row["case"]), []).append(row)
    for found in together.values():
        ours = next(row for row in found if library(row["name"]) == "gradclip")
        yield from ((ours, row) for row in found if library(row["name"]).strip(",") != "gradclip")


def _time(row):
    return rounded(row["ms"], 3)


def _ratio(row):
    return rounded(row["of ours"], 2)


def of_files(rows):
    """Return a line for each kind of file: gradclip, only reading, and loading first."""
    measured = {}
    for row in rows:
        measured.setdefault(row["workload"], []).append(row)
    lines = head("ms, from a warm cache", "norm", "only reading", "speed of reading", "loaded first", "memory, MB")
    for workload, found in measured.items():
        ours = next(row for row in found if library(row["name"]) == "gradclip")
        plain = next(row for row in found if row["name"].startswith("plain readinto, "))
        loaded = next((rounded(row["ms"], 3) for row in found if row["name"].endswith("then the norm")), "")
        peak = f"{ours['peak']:.0f}" if ours["peak"] else ""
        times = f"{rounded(ours['ms'], 3)} | {rounded(plain['ms'], 3)} | {ours['speed']:.2f}"
        lines += f"| {workload}, {ours['megabytes']:.0f} MB | {times} | {loaded} | {peak} |\n"
    return lines


@dataclass(frozen=True)
class Table:
    """A table between two marks on a page."""

    page: str
    name: str
    measured: Path
    lines: callable
    key: str = "rows"

    @property
    def marks(self):
        return f"<!-- {self.name}: written by benchmarks/tables.py -->\n", f"<!-- end of {self.name} -->\n"

    def on_page(self):
        start, end = self.marks
        return (ROOT / self.page).read_text().split(start)[1].split(end)[0]

    def current(self):
        return self.lines(json.loads(self.measured.read_text())[self.key])

    def write(self):
        start, page = self.marks[0], ROOT / self.page
        page.write_text(page.read_text().replace(start + self.on_page(), start + self.current()))


@dataclass(frozen=True)
class OfDevices(Table):
    """What is on a page of all GPUs. It stays as it is until one has been timed."""

    def current(self):
        found = measured(self.measured)
        picture = GPU_PICTURE.relative_to((ROOT / self.page).parent) if GPU_PICTURE.exists() else None
        return self.lines(found, picture) if found else self.on_page()


TABLES = [
    Table("docs/adaptive.md", "best figures", TRAINING, of_best, "tasks"),
    Table("docs/adaptive.md", "doubt", TRAINING, of_doubt, "tasks"),
    Table("docs/how-to/choose-a-threshold.md", "advice", TRAINING_ADVICE, of_advice, "tasks"),
    Table("docs/adaptive.md", "recoveries", SCENARIOS, of_recoveries, "scenarios"),
    Table("docs/speed.md", "short", CLIPPING, of_short),
    Table("docs/speed.md", "chosen", CLIPPING, of_chosen),
    Table("docs/speed.md", "times", CLIPPING, of_clipping),
    Table("docs/speed.md", "calls", CALLS, of_calls),
    Table("docs/speed.md", "files", FILES, of_files),
    Table("docs/speed.md", "private steps", PRIVATE_STEPS, of_private_times),
    Table("docs/tensorflow.md", "graphs", GRAPHS, of_graphs),
    Table("docs/speed.md", "mlx", GRAPHS_MLX, partial(of_graphs, other="mlx", called="MLX")),
    Table("docs/optimizers.md", "steps", FOLDED, of_folded, "lines"),
    Table("docs/accelerators.md", "counts", COUNTS, of_counts, "lines"),
    Table("docs/accelerators.md", "kernels", COUNTS_KERNELS, of_kernels, "lines"),
    OfDevices("docs/accelerators.md", "gpu", RESULTS, of_gpu),
    Table("docs/explanation/sensitivity.md", "sums", PER_EXAMPLE, of_sums),
    Table("docs/tutorials/private.md", "noise", NOISE, of_noise),
    Table("docs/sharded.md", "trainers", SHARDED_TRAINERS, of_trainers, "layouts"),
]
# They are printed only: no page has them.
BESIDE = [
    (TRAINING, "tasks", of_widths),
    (SCENARIOS, "scenarios", of_calm),
    (SCENARIOS, "scenarios", of_spikes),
    (SCENARIOS, "training", of_trainings),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    options = parser.parse_args()
    for table in TABLES:
        print(table.current())
        if options.write:
            table.write()
    for results, key, lines in BESIDE:
        print(lines(json.loads(results.read_text())[key]))


if __name__ == "__main__":
    main()
