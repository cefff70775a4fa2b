"""Write the table of what to install into docs/install.md, from pyproject.toml: `python scripts/install_table.py`."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "install.md"
MARKS = ("<!-- table: written by scripts/install_table.py -->\n", "<!-- end of table -->")
USES = {
    "torch": "clip in PyTorch",
    "jax": "clip in JAX and optax",
    "tensorflow": "clip in TensorFlow",
    "keras": "clip in Keras 3, on any of its backends",
    "mlx": "clip in MLX",
    "private": "add noise and compute epsilon",
    "cli": "use the command line",
    "plot": "draw what a monitor recorded",
    "tensorboard": "read TensorBoard's files with the command line",
}
# Extras for those who change gradclip.
OURS = {"test", "trainers", "bench", "docs", "lint", "release"}


def table(project):
    """Return the table: one row for each extra that users need, with what it installs."""
    extras = project["optional-dependencies"]
    rows = [("clip NumPy arrays, or with the frameworks that you have", "none", project["dependencies"])]
    rows += [(use, f"`{extra}`", extras[extra]) for extra, use in USES.items()]
    lines = [f"| {to} | {extra} | {', '.join(_shown(line) for line in lines)} |" for to, extra, lines in rows]
    return "\n".join(["| To | Extra | Installs |", "|---|---|---|", *lines]) + "\n"


def _shown(requirement):
    name, inner, rule = re.match(r"([\w-]+)(?:\[([\w,]+)\])?([^;]*)", requirement).groups()
    if inner:
        return f"what {inner.replace(',', ' and ').replace(' and ', ', ', inner.count(',') - 1)} install"
    return f"{name} {rule.strip()}".strip()


def pythons(project):
    """Return the versions of Python that gradclip declares, as a page says them."""
    found = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    return f"Python {found[0]} to {found[-1]}"


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def current():
    text = PAGE.read_text("utf-8")
    return text[text.index(MARKS[0]) + len(MARKS[0]) : text.index(MARKS[1])]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table(project()) + rest[rest.index(MARKS[1]) :], "utf-8")
