"""The commands that read logs of training runs. The code that does the work is imported only when a command runs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradclip._src.cli import INSTALL
from gradclip._src.json_text import to_json
from gradclip._src.words import printable

if TYPE_CHECKING:
    from gradclip._src.logs.replay import Replayed
    from gradclip._src.logs.summary import Summary

_LOG = Annotated[
    Path,
    typer.Argument(
        help="trainer_state.json, JSON lines, CSV, TensorBoard's files, or what Megatron, torchtitan or the Trainer "
        "print. A folder of TensorBoard or of checkpoints works too.",
        show_default=False,
    ),
]


def threshold(text: str) -> float:
    """Return the nearest float. Raises `typer.BadParameter` for what is no number, or beyond float64's range."""
    try:
        number = float("" if "_" in text else text)  # Python reads 1_0 as 10
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number. Pass for example 1.0.") from None
    digits = text.lower().partition("e")[0]
    if any(one in "123456789" for one in digits) and (math.isinf(number) or not number):
        raise typer.BadParameter(f"{text} is beyond float64's range. Pass inf for no threshold.")
    return number


_MAX_NORM = Annotated[
    float | None,
    typer.Option(
        parser=threshold, metavar="C", help="The threshold of the run; inf if it did not clip.", show_default=False
    ),
]
_KEY = Annotated[str | None, typer.Option(help="The name of the norm in the log.", show_default=False)]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_OUT = Annotated[Path | None, typer.Option(help="Also draw a picture, and write it here.", show_default=False)]
_RULES = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        help="A number, adaptive, spread, steady, quantile, skip or autoclip, with settings as in "
        "quantile:factor=3,window=64. May be given several times.",
        show_default=False,
    ),
]
_OTHER_COLUMNS, _LONGEST_RULE = 80, 60  # characters
_DEFAULT_RULES = ("1.0", "adaptive", "quantile", "skip")


def advise(log: _LOG, max_norm: _MAX_NORM = None, key: _KEY = None, as_json: _JSON = False, out: _OUT = None) -> None:
    """Say how often a run clipped, where it had spikes, and which threshold to try.

    Reads the norms that the run logged.
    """
    summary = _summary(log, max_norm, key)
    if out is not None:
        _draw(lambda path: _picture_of(summary, path), out)
    if as_json:
        typer.echo(to_json(summary.plain(), 9, indent=2))
        return
    for line in summary.lines():
        typer.echo(line)


def replay(
    log: _LOG,
    rule: _RULES = None,
    max_norm: _MAX_NORM = None,
    key: _KEY = None,
    as_json: _JSON = False,
    out: _OUT = None,
) -> None:
    """Say what other thresholds would have done to the norms that a run logged.

    The norms stay as they were: a run with another threshold would have had others.
    """
    from gradclip._src.logs.replay import ThresholdRule
    from gradclip._src.logs.replay import replay as replay_rules

    try:
        rules = [ThresholdRule.parse(text) for text in rule or _DEFAULT_RULES]
    except (TypeError, ValueError) as error:
        fail(str(error), 2)
    summary = _summary(log, max_norm, key)
    if math.isfinite(summary.max_norm) and not rule:
        rules = [ThresholdRule.parse(f"{summary.max_norm:g}"), *(one for one in rules if one.fixed != summary.max_norm)]
    found = replay_rules(summary.columns, rules)
    if out is not None:
        _draw(lambda path: _picture_of_rules(summary, found, path), out)
    if as_json:
        typer.echo(to_json({"log": summary.plain(), "rules": [one.plain() for one in found]}, 9, indent=2))
        return
    for line in summary.lines()[: summary.lines().index("")]:
        typer.echo(line)
    _print_table(found)


def fail(message: str, code: int) -> Any:
    """Print an error in one line, and exit."""
    typer.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    raise typer.Exit(code)


def _summary(log: Path, max_norm: float | None, key: str | None) -> "Summary":
    from gradclip._src.logs.read import read
    from gradclip._src.logs.rows import LogError
    from gradclip._src.logs.summary import Summary

    if max_norm is not None and not max_norm >= 0:
        fail(f"--max-norm must not be negative or NaN, got {max_norm!r}.", 2)
    try:
        return Summary.of(read(log, key), max_norm)
    except LogError as error:
        fail(str(error), 1)
        raise


def _draw(write: Callable[[Path], object], out: Path) -> None:
    try:
        if out.is_dir():
            raise IsADirectoryError("it is a folder")
        write(out)
    except ModuleNotFoundError as error:
        fail(
            f"Pictures need {error.name or 'matplotlib'}, not installed here. To install it: {INSTALL.format('plot')}",
            1,
        )
    except (OSError, ValueError) as error:
        fail(f"could not write to {str(out)!r}: {error}. Pass a different file with --out, such as picture.png.", 2)


def _picture_of(summary: "Summary", path: Path) -> None:
    from gradclip._src.monitor.page.picture import draw

    draw(summary.overview).savefig(path)


def _picture_of_rules(summary: "Summary", found: "list[Replayed]", path: Path) -> None:
    from gradclip._src.logs.picture import write

    write(summary.columns, found, path)


def _print_table(found: "list[Replayed]") -> None:
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table

    from gradclip._src.monitor.page.tables import percent

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule", overflow="fold")
    for name in ("clips", "skips", "spikes stopped", "median", "last", "largest left"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        plain = one.plain()
        table.add_row(
            one.rule,
            percent(plain["clipped_share"]),
            percent(plain["skipped_share"]),
            f"{plain['spikes_stopped']} of {plain['spikes']}",
            *(f"{plain[name]:.4g}" for name in ("median_threshold", "last_threshold", "largest_after")),
        )
    text = io.StringIO()
    longest = max(len(one.rule) for one in found)
    width = max(80, Console().width, _OTHER_COLUMNS + min(longest, _LONGEST_RULE))
    Console(file=text, highlight=False, markup=False, width=width).print(table)
    for line in text.getvalue().splitlines():
        typer.echo(line.rstrip())
    typer.echo("median, last: of the thresholds. largest left: the largest norm that is left.")
