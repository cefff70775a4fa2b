"""Tables: CSV, with commas, semicolons or tabs."""

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradclip._src.logs.files import lines
from gradclip._src.logs.json_files import no_norm
from gradclip._src.logs.rows import Keys, Log, LogError, counted, number, plain, rows_of

_KINDS = {
    ",": "a table (CSV)",
    ";": "a table (CSV with semicolons)",
    "\t": "a table (CSV with tabs)",
}
_OF_A_MESSAGE = re.compile(r"\[(?:INFO|DEBUG|WARNING|ERROR)\]")
_AROUND = ",; \t\r\n\"'"
_BETWEEN = re.compile(r"[,;\s\"']+")
_BOUNDS = ("__MIN", "__MAX")  # columns that Weights & Biases adds


def columns_of(first: str) -> tuple[list[str], str] | None:
    """Return the names in the first line of a table, and what separates them; None if it is no table."""
    found = [([name.strip() for name in _names(first, one)], one) for one in _KINDS]
    names, separator = max(found, key=lambda one: len(one[0]))
    if _OF_A_MESSAGE.search(first):
        return None
    return (names, separator) if len(names) > 1 or (names and plain(names[0]) == "grad_norm") else None


def holds_numbers(first: str) -> bool:
    """Say whether a line holds nothing but numbers, so that it names no columns."""
    return all(number(one) is not None for one in _BETWEEN.split(first.strip(_AROUND)))


def without_names(path: Path, first: str) -> LogError:
    """Return the error for a table whose first line is one of numbers."""
    names = "step,grad_norm,loss" if _BETWEEN.search(first.strip(_AROUND)) else "grad_norm"
    return LogError(
        f"{path} begins with numbers, so it does not say which of them are norms. Put the names of its columns in a "
        f"first line, such as {names}."
    )


def of_table(path: Path, key: str | None) -> Log:
    """Read a table whose first line names the columns."""
    every = lines(path)
    first = next((line for line in every if line.strip()), "")
    found = columns_of(first)
    if found is None:
        raise no_norm(path, (), key)
    names, separator = found
    keys = Keys.among([name for name in names if not name.endswith(_BOUNDS)], key)
    if keys is None:
        raise no_norm(path, names, key)
    unread: list[csv.Error] = []
    entries = (dict(zip(names, one, strict=False)) for one in _entries(every, separator, unread))
    rows, left_out = rows_of(entries, keys, names)
    if not rows:
        raise no_norm(path, names, keys.norm)
    notes = (counted(len(unread), "row could", "rows could") + f" not be read: {unread[0]}.",) if unread else ()
    return Log(_KINDS[separator], rows, notes=notes + left_out)


def _names(first: str, separator: str) -> list[str]:
    return next(_entries([first], separator, []), [])


def _entries(every: Iterable[str], separator: str, unread: list[csv.Error]) -> Iterator[list[str]]:
    """Yield the rows that can be read; keep the errors of the others."""
    rows = csv.reader(every, delimiter=separator, skipinitialspace=True)
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            unread.append(error)
