"""A file for each metric, whose lines hold a time, a value and a step, as MLflow keeps them in folders."""

from pathlib import Path

from gradclip._src.logs.files import lines
from gradclip._src.logs.json_files import no_norm
from gradclip._src.logs.rows import NORMS, Log, Row, bounded, norm_or_nan, number, plain, whole

_LOSSES = ("loss", "train_loss")


def is_metric(path: Path, first: str) -> bool:
    """Say whether a file has the name of a norm, and a time, a value and a step in its first line."""
    return plain(path.name) in NORMS and _row(first) is not None


def metrics_of(folder: Path, key: str | None) -> list[Path]:
    """Return the files of norms in a run's folder, or those named `key`."""
    root = folder / "metrics" if (folder / "metrics").is_dir() else folder
    each = [one for depth in ("*", "*/*") for one in sorted(root.glob(depth)) if one.is_file()]
    if key is not None:
        return [one for one in each if one.relative_to(root).as_posix() == key]
    return [one for one in each if plain(one.name) in NORMS]


def of_metric(path: Path) -> Log:
    """Read the file of a norm, and the loss from the file beside it."""
    rows = list(bounded(map(_row, lines(path))))
    if not rows:
        raise no_norm(path, (), path.name)
    losses = next((one for name in _LOSSES if (one := path.with_name(name)).is_file()), None)
    of_step = {} if losses is None else {row.step: row.norm for row in bounded(map(_row, lines(losses)))}
    return Log("a file of a metric", [row._replace(loss=of_step.get(row.step, row.loss)) for row in rows])


def _row(line: str) -> Row | None:
    parts = line.split()
    if len(parts) != 3 or whole(parts[0]) is None or (step := whole(parts[2])) is None:
        return None
    value = number(parts[1])
    return None if value is None else Row(step, norm_or_nan(value))
