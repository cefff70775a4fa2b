"""README's table of times, made of what clipping.py has measured. `--write` puts it into the README."""

import argparse
import json
from pathlib import Path

from report import CLIPPING, library, rounded

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- times: written by benchmarks/readme_table.py -->\n", "<!-- end of times -->\n"
HEAD = """\
| ms, not clipped / clipped | gradclip | floor | the library replaced | times as fast |
|---|---|---|---|---|
"""
KINDS = {
    "torch float32": "PyTorch float32",
    "torch bfloat16": "PyTorch bfloat16",
    "torch float16": "PyTorch float16",
    "NumPy float32": "NumPy float32 in place",
    "JAX jitted float32": "`jax.jit`",
    "JAX donated float32": "`jax.jit`, donated",
    "JAX eager float32": "eager JAX",
}


def table(clipping):
    measured = {}
    for row in clipping["rows"]:
        names = measured.setdefault((row["workload"], row["kind"]), {})
        names.setdefault(row["name"], {})[row["case"]] = row
    return HEAD + "".join(
        line for (workload, kind), names in measured.items() for line in _lines(f"{workload}, {KINDS[kind]}", names)
    )


def _lines(title, names):
    """Return a line for each library replaced; those after the first repeat nothing."""
    ours = next(cases for name, cases in names.items() if library(name) == "gradclip")
    floor = f"{_both(names['floor'], 'ms', 3)} " if "floor" in names else ""
    first = f"| {title} | {_both(ours, 'ms', 3)} | {floor}"
    for name, cases in names.items():
        if library(name) not in ("gradclip", "floor"):
            yield f"{first}| {library(name)} {_both(cases, 'ms', 3)} | {_both(cases, 'of ours', 2)} |\n"
            first = "| | | "


def _both(cases, what, figures):
    return " / ".join(rounded(cases[case][what], figures) for case in ("not clipped", "clipped"))


def in_readme():
    return README.read_text().split(START)[1].split(END)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clipping", type=Path, default=CLIPPING)
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    options = parser.parse_args()
    lines = table(json.loads(options.clipping.read_text()))
    print(lines, end="")
    if options.write:
        README.write_text(README.read_text().replace(START + in_readme(), START + lines))


if __name__ == "__main__":
    main()
