"""Store the results in a file."""

import json
from pathlib import Path
from typing import Any

from side_by_side.functions import Library
from side_by_side.run import RANDOM_INPUTS, bounds, rows

FILE = Path(__file__).parents[2] / "docs" / "parity.json"
Record = dict[str, Any]


def of_library(library: Library) -> Record:
    """Return the version, and for each function the verdict on each case and how often it keeps its bound."""
    functions: Record = {function.name: {"bound": None, "cases": {}} for function in library.functions}
    for row in rows(library):
        cells = [row[key] for key in ("kind", "why", "theirs", "ours", "exact")]
        functions[row["function"]]["cases"][row["case"]] = cells
    for bound in bounds(library):
        functions[bound["function"]]["bound"] = {"theirs": bound["theirs"], "ours": bound["ours"]}
    return {"version": library.version, "functions": functions}


def read(path: Path = FILE) -> Record:
    """Return the record, or an empty one if there is no file yet."""
    return json.loads(path.read_text()) if path.exists() else {"inputs": RANDOM_INPUTS, "libraries": {}}


def write(record: Record, path: Path = FILE) -> None:
    """Write the record, one line per row."""
    parts = [f' "{name}": {_library(found)}' for name, found in record["libraries"].items()]
    path.write_text(f'{{"inputs": {record["inputs"]}, "libraries": {{\n' + ",\n".join(parts) + "\n}}\n")


def _library(found: Record) -> str:
    functions = [f"  {json.dumps(name)}: {_function(of)}" for name, of in found["functions"].items()]
    return f'{{"version": "{found["version"]}", "functions": {{\n' + ",\n".join(functions) + "\n }}"


def _function(of: Record) -> str:
    cases = [f"   {json.dumps(name)}: {json.dumps(cells)}" for name, cells in of["cases"].items()]
    return f'{{"bound": {json.dumps(of["bound"])}, "cases": {{\n' + ",\n".join(cases) + "\n  }}"
