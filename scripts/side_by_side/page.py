"""Write the page: a summary of all functions, then the rows in which gradclip is better or different."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from side_by_side.formats import ULP
from side_by_side.reasons import reason_for
from side_by_side.record import Record
from side_by_side.run import MODULES

FILE = Path(__file__).parents[2] / "docs" / "parity.md"
HEAD = """# Every function compared with the library's own

**In short.** In {same:,} of {rows:,} comparisons gradclip's result is the same as the library's, in {better:,} it is
better, and in {different:,} it differs on purpose. Of {bounds} functions that clip, gradclip's keep the bound on every
random input; the libraries' own do so for {kept}.

`make parity` runs each function of an integrated library and gradclip's on the same inputs: {cases} cases, ordinary
and extreme, and {inputs:,} random inputs. It computes the right result in exact arithmetic and derives each verdict
from it. It writes this page and [a file of all rows](parity.json).

- **same**: the results differ by at most 4 units in the last place (ulps), or both functions raise an error.
- **better**: one of these holds.
    - gradclip's result is nearer to the exact one.
    - gradclip's result keeps the bound and is within 128 ulps of the exact one. The library's exceeds the bound.
    - gradclip returns a result. The library raises an error.
    - No norm can satisfy the threshold. gradclip raises an error, and the library returns numbers.
- **different**: neither. Each such row quotes its reason from [the page on differences](differences.md).

**Bound kept** counts the random inputs for which the norm of the result, in exact arithmetic, is at most the
threshold. **Excess** is the largest relative amount by which the library's norm exceeds the threshold. The random
inputs are ordinary: twelve normally distributed numbers with a norm above the threshold. They use each dtype of the
function in turn. For sums over examples the input is one example. There, both functions may exceed the bound by one
rounding to nearest. "–" means that the function does not clip, or that another row covers it.

Each library has a table of its functions, and below it, folded, one of the rows that are not the same. Their numbers
are from the first function and first case of a row, for the element in which the two results differ most.
"""
SUMMARY = """
## {library} {version}

| function | same | better | different | bound kept, {library} | gradclip | excess, float32 | any format |
|---|---|---|---|---|---|---|---|
"""
DETAILS = """
<details markdown="1"><summary>{number} rows that are not the same</summary>

| case and functions | {library} | gradclip | exact | |
|---|---|---|---|---|
"""
WHY = {
    "nearer": "nearer",
    "bound": "keeps the bound",
    "refused": "refuses",
    "answered": "answers",
}


def page(record: Record) -> str:
    """Return the page in Markdown."""
    libraries = record["libraries"]
    lines = [HEAD.format(**_counts(record))]
    for name in libraries:
        lines += [*_summary(name, libraries[name]), *_details(name, libraries[name])]
    missing = [name for name in MODULES if name not in libraries]
    lines += [f"\nNot run when this page was written: {', '.join(missing)}.\n"] if missing else []
    return "".join(lines)


def _counts(record: Record) -> dict[str, int]:
    """Return how many cases, random inputs, rows of each kind, and functions that keep their bound there are."""
    functions = [of for found in record["libraries"].values() for of in found["functions"].values()]
    rows = Counter(cells[0] for of in functions for cells in of["cases"].values())
    bounds = [of["bound"] for of in functions if of["bound"]]
    return {
        "cases": len({case for of in functions for case in of["cases"]}),
        "inputs": record["inputs"],
        "rows": rows.total(),
        **{kind: rows[kind] for kind in ("same", "better", "different")},
        "bounds": len(bounds),
        "kept": sum(bound["theirs"]["kept"] == record["inputs"] for bound in bounds),
    }


def _summary(library: str, found: Record) -> Iterator[str]:
    yield SUMMARY.format(library=library, version=found["version"])
    for function, of in found["functions"].items():
        counts = Counter(cells[0] for cells in of["cases"].values())
        kinds = " | ".join(str(counts[kind]) for kind in ("same", "better", "different"))
        yield f"| {_code(function)} | {kinds} | {_bound(of['bound'])} |\n"


def _bound(bound: Record | None) -> str:
    if bound is None:
        return "– | – | – | –"
    theirs, ours = bound["theirs"], bound["ours"]
    return (
        f"{theirs['kept']:,} | {ours['kept']:,} | {_relative(theirs['worst_float32'])} | {_relative(theirs['worst'])}"
    )


def _relative(excess: float) -> str:
    return f"{excess:.0e}".replace("e-0", "e-") if excess else "0"


def _details(library: str, found: Record) -> Iterator[str]:
    grouped = _grouped(library, found)
    yield DETAILS.format(library=library, number=len(grouped))
    for (_, note), together in grouped.items():
        functions = dict.fromkeys(function for function, _, _ in together)
        cases = _titles(dict.fromkeys(case for _, case, _ in together))
        yield f"| {cases}: {_listed(list(functions), found)} | {_cells(together[0][2])} | {note} |\n"
    yield "\n</details>\n"


def _grouped(library: str, found: Record) -> dict[tuple[str, str], list[tuple[str, str, list[str]]]]:
    """Return the rows that are not the same, grouped: cases that differ only in format, or that share a threshold.

    Each kind of error and each reason is one row.
    """
    groups: dict[tuple[str, str], list[tuple[str, str, list[str]]]] = {}
    for case, function, cells in _rows(found):
        kind, why = cells[:2]
        if kind != "same":
            family = _family(case) if kind == "better" and why in ("nearer", "bound") else ""
            groups.setdefault((family, _note(library, function, case, kind, why)), []).append((function, case, cells))
    return groups


def _titles(cases: Iterable[str]) -> str:
    """Return the names of cases; for a family of cases, its name with the variants in brackets."""
    families: dict[str, list[str]] = {}
    for case in cases:
        family = _family(case)
        families.setdefault(family, []).append(case.removeprefix(family).strip(", "))
    named = [(name, ", ".join(filter(None, formats)), all(formats)) for name, formats in families.items()]
    return "; ".join(
        f"{name} ({more})" if alone else f"{name}, also {more}" if more else name for name, more, alone in named
    )


def _rows(found: Record) -> Iterator[tuple[str, str, list[str]]]:
    """Yield case, function and cells, sorted by case."""
    order = dict.fromkeys(case for of in found["functions"].values() for case in of["cases"])
    for case in order:
        for function, of in found["functions"].items():
            if case in of["cases"]:
                yield case, function, of["cases"][case]


def _family(case: str) -> str:
    first, *rest = case.split(", ")
    known = first.startswith("threshold") or (rest and any(name in rest[-1] for name in (*ULP, "complex64")))
    return first if known else case


def _note(library: str, function: str, case: str, kind: str, why: str) -> str:
    if kind == "better":
        return f"better: {WHY[why]}"
    reason = reason_for(library, function, case, why)
    return f"different: [{reason.text}](differences.md)" if reason else f"DIFFERENT, without a reason: {why}"


def _listed(functions: list[str], found: Record) -> str:
    names = list(found["functions"])
    if len(names) > 1 and functions == names:
        return "all functions"
    return (
        ", ".join(map(_code, functions))
        if len(functions) < 4
        else f"{len(functions)} functions, as {_code(functions[0])}"
    )


def _code(function: str) -> str:
    name, *variant = function.split(" ", 1)
    return " ".join([f"`{name}`", *variant])


def _cells(cells: list[str]) -> str:
    return " | ".join(cells[2:])
