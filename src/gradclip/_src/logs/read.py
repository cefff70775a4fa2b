"""Read a log: find out its format, and return its rows."""

import re
from pathlib import Path

from gradclip._src.logs.events import is_event_file, of_events
from gradclip._src.logs.files import is_text, start_of
from gradclip._src.logs.json_files import no_norm, of_document, of_lines
from gradclip._src.logs.metrics import is_metric, metrics_of, of_metric
from gradclip._src.logs.rows import Log, LogError
from gradclip._src.logs.text import (
    COMMENT,
    columns_of,
    holds_norm,
    holds_numbers,
    is_table,
    of_table,
    of_text,
    without_names,
)

_STATE = "trainer_state.json"
_EVENTS = "*tfevents*"
_JSON = re.compile(r"\s*(?:\{\s*[\"}]|\[\s*[\]{])")
_OBJECTS = re.compile(r"^\{", re.M)


def read(path: str | Path, key: str | None = None) -> Log:
    """Return what a log says. Raises LogError, with one line for the user, if it holds no norms or cannot be read.

    Args:
        path: a file, or a folder with TensorBoard's files, with checkpoints of Hugging Face's Trainer, or with a file
            for each metric.
        key: the name of the norm in the log; None to find it.

    """
    path = Path(path)
    try:
        if path.is_dir():
            return _of_folder(path, key)
        if not path.exists():
            raise LogError(f"{path} does not exist.")
        if not path.is_file():
            raise LogError(f"{path} is no file.")
    except LogError:
        raise
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise LogError(f"{str(path)!r} could not be read: {error}.") from error
    return _of_file(path, key)


def _of_folder(path: Path, key: str | None) -> Log:
    """Read the files of TensorBoard in a folder, or the newest state of Hugging Face's Trainer."""
    found = (*path.glob(_STATE), *path.glob(f"checkpoint-*/{_STATE}"))
    states = [one for one in found if one.is_file()]  # to open a pipe would wait forever
    if states:
        newest = max(states, key=lambda one: (one.stat().st_mtime, str(one)))
        log = _of_file(newest, key)
        which = f"{newest.relative_to(path)} is read, the newest of {len(states)} states."
        return log._replace(notes=(*log.notes, which)) if len(states) > 1 else log
    for pattern in (_EVENTS, f"*/{_EVENTS}"):
        if events := sorted(one for one in path.glob(pattern) if one.is_file()):
            runs = sorted({one.parent for one in events})
            if len(runs) > 1:
                raise LogError(f"{path} has several runs: {', '.join(one.name for one in runs)}. Pass one of them.")
            return of_events(events, key)
    if metrics := metrics_of(path, key):
        if len(metrics) > 1:
            raise LogError(f"{path} has several norms: {', '.join(str(one) for one in metrics)}. Pass one of them.")
        return of_metric(metrics[0])
    raise LogError(f"{path} is a folder without {_STATE} and without TensorBoard's files.")


def _of_file(path: Path, key: str | None) -> Log:
    start = start_of(path)
    if is_event_file(start):
        return of_events([path], key)
    if not is_text(start):
        raise LogError(f"{path} is no text, and no file of TensorBoard.")
    text = start.decode("utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", "replace")
    every = [line for line in text.replace("\0", "").splitlines() if line.strip()]
    first = next((line for line in every if not line.startswith(COMMENT)), every[0] if every else None)
    if first is None:
        raise LogError(f"{path} holds nothing but spaces.")
    if _JSON.match(text):
        indented = first.strip() == "{"
        return (of_lines if len(_OBJECTS.findall(text)) > 1 and not indented else of_document)(path, key)
    if is_metric(path, first):
        return of_metric(path)
    numbers = holds_numbers(first)
    table = None if numbers or holds_norm(first) else columns_of(first)
    if table is not None and is_table(table[0], key):
        return of_table(path, key)
    try:
        return of_text(path, key)
    except LogError as error:
        if numbers:
            raise without_names(path, first) from None
        raise (no_norm(path, table[0], key) if table is not None else error) from None
