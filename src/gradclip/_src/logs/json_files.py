"""JSON: the `trainer_state.json` of Hugging Face's Trainer, lists of steps, columns, and lines with one step each.

The entries of an object within another have the names of both: `info/grad_norm`.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradclip._src.logs.files import document, lines
from gradclip._src.logs.rows import BY_GRADCLIP, NORMS, Keys, Log, LogError, Row, counted, plain, rows_of
from gradclip._src.words import listed, printable

HISTORY = "log_history"
_TRAINER_ENTRIES = {"loss", "grad_norm", "learning_rate", "epoch"}
TRAINER_DEFAULT = 1.0  # max_grad_norm of TrainingArguments
BEFORE_CLIPPING = "before clipping"
_MOST_NAMES = 10_000
_LONGEST = 60  # characters of a name in an error
_LIST = re.compile(r'"[^"]{1,100}"\s{0,20}:\s{0,20}\[\s{0,20}\{')  # of objects, under a name
_CUT_OFF = "The file is cut off or damaged: what could be read of it is used."


def of_lines(path: Path, key: str | None) -> Log:
    """Read a file with a JSON object in each line."""
    names: dict[str, None] = {}
    unread = 0
    for line in lines(path):
        found = flat(parsed(line)) if line.strip() else {}
        unread += not isinstance(found, dict)
        if isinstance(found, dict) and len(names) < _MOST_NAMES:
            names.update(dict.fromkeys(map(str, found)))
    # Read again instead of keeping all entries: they may have many.
    keys = Keys.among(names, key)
    rows, notes = _rows_of((flat(parsed(line)) for line in lines(path)), keys, names)
    notes += (counted(unread, "line is no JSON object.", "lines are no JSON objects."),) if unread else ()
    if not rows:
        raise no_norm(path, names, key if keys is None else keys.norm)
    if {"norm", "max_norm"} <= names.keys():
        return Log("lines of JSON that a gradclip.Monitor saved", rows, measured=BEFORE_CLIPPING, notes=notes)
    if names.keys() >= _TRAINER_ENTRIES:
        return _by_trainer("lines of JSON, as Hugging Face's Trainer logs", rows, names, notes)
    return Log("lines of JSON", rows, notes=notes)


def of_document(path: Path, key: str | None) -> Log:
    """Read a file that is one JSON value, as far as it is whole."""
    text = document(path)
    found = parsed(text)
    notes: tuple[str, ...] = ()
    if found is None:
        found, whole = _as_far_as_whole(text)
        notes = () if whole else (_CUT_OFF,)
    if isinstance(found, dict) and isinstance(found.get(HISTORY), list):
        rows, names, left_out = _rows(found[HISTORY], key)
        made = _by_trainer("trainer_state.json of Hugging Face's Trainer", rows, names, notes + left_out)
    else:
        rows, names, left_out = _rows(_steps(found), key)
        made = Log("JSON", rows, notes=notes + left_out)
    if not rows:
        keys = Keys.among(names, key)
        raise no_norm(path, names, key if keys is None else keys.norm)
    return made


def parsed(text: str) -> Any:
    """Return a JSON value; None if it is not whole, or nested too deep to be a log."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def flat(found: object, deepest: int = 8) -> Any:
    """Return an object with the entries of those within it, under the names of both; anything else as it is."""
    if not isinstance(found, dict) or deepest == 0 or not any(isinstance(value, dict) for value in found.values()):
        return found
    inner = {name: flat(value, deepest - 1) for name, value in found.items()}
    made = {name: value for name, value in inner.items() if not isinstance(value, dict)}
    for name, value in inner.items():
        if isinstance(value, dict):
            made |= {f"{name}/{part}": one for part, one in value.items()}
    return made


def _steps(found: object) -> Iterable[Any]:
    """Return the steps of a list of them, also of one under any name, of a dict of columns, or one step."""
    if isinstance(found, list):
        return found
    if not isinstance(found, dict):
        return ()
    columns = {name: column for name, column in found.items() if isinstance(column, list)}
    tables = [column for column in columns.values() if column and all(isinstance(one, dict) for one in column)]
    if tables:
        norms = (one for one in tables if any(plain(str(name)) in NORMS for row in one for name in flat(row)))
        return next(norms, tables[0])
    if not columns:
        listed_in = [value for value in found.values() if isinstance(value, dict)]
        return (found, *listed_in)
    longest = max(map(len, columns.values()))
    return (
        {name: column[place] for name, column in columns.items() if place < len(column)} for place in range(longest)
    )


def _as_far_as_whole(text: str) -> tuple[Any, bool]:
    """Return the history of a state that is cut off, the first entries of a list, or values one after the other.

    Also return whether that is all.
    """
    at = text.find(f'"{HISTORY}"')
    place = text.find("[", at) + 1 if at >= 0 or text.lstrip().startswith("[") else 0
    decoder, whole = json.JSONDecoder(), place == 0
    found: list[Any] = []
    while (place := text.find("{", place)) >= 0:
        try:
            entry, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            inner = _LIST.search(text, place) if whole and not found else None
            whole = False
            if inner is None:
                break
            place = inner.end() - 1
            continue
        found.append(entry)
    return ({HISTORY: found} if at >= 0 else found), whole


def _rows(found: Iterable[Any], key: str | None) -> tuple[list[Row], set[str], tuple[str, ...]]:
    """Return the rows of entries that hold a norm, the names of all entries, and what was left out."""
    entries = [flat(entry) for entry in found if isinstance(entry, dict)]
    names: dict[str, None] = {}
    for entry in entries:
        if len(names) < _MOST_NAMES:
            names.update(dict.fromkeys(map(str, entry)))
    keys = Keys.among(names, key)
    rows, left_out = _rows_of(entries, keys, names)
    return rows, set(names), left_out


def _rows_of(found: Iterable[Any], keys: Keys | None, names: Iterable[str]) -> tuple[list[Row], tuple[str, ...]]:
    return ([], ()) if keys is None else rows_of((entry for entry in found if isinstance(entry, dict)), keys, names)


def _by_trainer(kind: str, rows: list[Row], names: Iterable[str], notes: tuple[str, ...]) -> Log:
    """Return the log of a run of Hugging Face's Trainer, which clips to its default unless gradclip clips instead."""
    own = any(plain(name) == BY_GRADCLIP for name in names)
    return Log(kind, rows, math.nan if own else TRAINER_DEFAULT, not own, BEFORE_CLIPPING, notes)


def no_norm(path: Path, names: Iterable[str], key: str | None) -> LogError:
    """Return the error for a log without norms. `key` is the name of those that are no numbers."""
    known: Sequence[str] = sorted(printable(name, _LONGEST) for name in names)
    has = f" Its entries are {listed(known)}." if known else ""
    if key is not None:
        return LogError(f"{path} has no numbers named {printable(key, _LONGEST)}.{has}")
    return LogError(
        f"{path} has no norms of gradients.{has}{' If one is the norm, name it with --key.' if has else ''}"
    )
