"""The commands that read files of arrays. The code that does the work is imported only when a command runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gradclip._src.cli.logs import fail, threshold
from gradclip._src.json_text import to_json
from gradclip._src.words import printable

if TYPE_CHECKING:
    from gradclip._src.backends.host.arrays import HostArray
    from gradclip._src.updates.files import Stored
    from gradclip._src.updates.verdict import Measurement, Slot, UpdateCheck

_FILES = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="safetensors, the index of sharded safetensors, .npz, .npy, or PyTorch's .pt.",
        show_default=False,
    ),
]
_ORD = Annotated[str, typer.Option("--ord", help="The order of the norm: a number from 1 to 8, inf or -inf.")]
_WHOLE_ORD = Annotated[
    str, typer.Option("--ord", help="The order of the norm: a whole number from 1 to 8, inf or -inf.")
]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON: a list with an object for each file.")]
_TOGETHER = Annotated[bool, typer.Option("--together", help="All files are the parts of one update.")]
_MINUS = Annotated[
    Path | None,
    typer.Option("--minus", help="Measure each FILE minus this one, as an update of weights.", show_default=False),
]


_MAX_NORM = Annotated[
    float,
    typer.Option(
        "--max-norm",
        parser=threshold,
        metavar="C",
        help="The threshold, as a float: 0.1 is Python's 0.1.",
        show_default=False,
    ),
]
_LIKE = Annotated[
    Path | None,
    typer.Option(
        "--like",
        help="A file whose names, shapes and dtypes each update must have. Its values are not read.",
        show_default=False,
    ),
]

R = TypeVar("R")
A = TypeVar("A", "UpdateCheck", "Measurement")


@dataclass(frozen=True)
class Renamed:
    """An array of a file, with the file's name before its own."""

    name: str
    of: "Stored"

    @property
    def dtype(self) -> str:
        """The dtype of the array."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.of.shape

    def pieces(self) -> "Iterator[HostArray]":
        """Yield the pieces of the array."""
        return self.of.pieces()


def norm(
    files: _FILES, minus: _MINUS = None, ord: _ORD = "2", as_json: _JSON = False, together: _TOGETHER = False
) -> None:
    """Print the norm of the arrays in each file, and where NaN and infinities are.

    Arrays of integers do not count. Files of any size are read piece by piece.
    """
    from gradclip._src.core.accumulators import check_order
    from gradclip._src.core.norms import Order
    from gradclip._src.updates.judge import Measurement, measure

    order = _usable("--ord", lambda: check_order(Order.parse(_number(ord))))
    _check_there(*files, minus)
    if minus is not None and together:
        fail("--minus subtracts one file from each FILE. Leave out --together.", 2)
    answers = (
        _answer(some, lambda arrays: measure(arrays, order), Measurement.failed, minus)
        for some in _updates(files, together=together)
    )
    found = _told(files, answers, {"ord": order.p}, as_json=as_json, together=together)
    _exit(all(not one.faults for one in found))


def check(
    files: _FILES,
    max_norm: _MAX_NORM,
    like: _LIKE = None,
    ord: _WHOLE_ORD = "2",
    as_json: _JSON = False,
    together: _TOGETHER = False,
) -> None:
    """Say whether the update in each file is acceptable, and if not, why. Exits with 1 if one is not.

    An update is refused if its norm exceeds the threshold, in exact arithmetic, if it holds NaN or infinities, or if it
    differs from --like. Files of any size are read piece by piece.
    """
    from gradclip._src.updates.judge import checked_order, judge
    from gradclip._src.updates.verdict import UpdateCheck, refusal

    order = _usable("--ord", lambda: checked_order(_number(ord)))
    if not max_norm >= 0:
        fail(f"--max-norm must not be negative or NaN, got {max_norm!r}.", 2)
    _check_there(*files, like)
    template = None if like is None else _usable("--like", lambda: _template(like))

    def judged(arrays: "Sequence[Stored]") -> UpdateCheck:
        return judge(arrays, max_norm, order, template, advice="--like")

    answers = (_answer(some, judged, refusal) for some in _updates(files, together=together))
    found = _told(files, answers, {"max_norm": max_norm, "ord": order.p}, as_json=as_json, together=together)
    if len(found) > 1 and not as_json:
        accepted = sum(map(bool, found))
        typer.echo(f"{accepted} accepted, {len(found) - accepted} refused.")
    _exit(all(found))


def _number(text: str) -> float | str:
    """Return the number that a text is, or the text: the checks of orders say what is wrong with it."""
    try:
        return float("" if "_" in text else text)
    except ValueError:
        return text


def _usable(option: str, read: Callable[[], R]) -> R:
    try:
        return read()
    except (OSError, ValueError) as error:
        fail(f"{option}: {error}", 2)
        raise


def _check_there(*files: Path | None) -> None:
    for file in files:
        try:
            there = file is None or file.exists()
        except OSError as error:  # a name that is too long, or a folder that may not be read
            fail(f"{str(file)!r} cannot be opened: {error.strerror}.", 2)
            raise
        if not there:
            fail(f"there is no file {str(file)!r}.", 2)


def _template(like: Path) -> "list[Slot]":
    from gradclip._src.updates.files import open_file
    from gradclip._src.updates.verdict import of_arrays

    with open_file(like) as opened:
        slots = of_arrays(opened.arrays)
    if not slots:
        raise ValueError(f"{str(like)!r} holds no arrays. Pass a file like the updates.")
    return slots


def _updates(files: Sequence[Path], *, together: bool) -> list[list[Path]]:
    return [list(files)] if together else [[file] for file in files]


def _answer(
    files: Sequence[Path],
    ask: "Callable[[Sequence[Stored]], R]",
    failed: Callable[[str], R],
    minus: Path | None = None,
) -> R:
    """Return the answer about the arrays in the files of one update; what `failed` makes of an error on the way."""
    from gradclip._src.updates.verdict import in_one_line

    with ExitStack() as opened:
        try:
            bar = opened.enter_context(_bar(files[0].name))
            return ask(_arrays(files, minus, bar, opened))
        except Exception as error:  # whatever a file makes its reader raise: the other files are still judged
            return failed(in_one_line(error).removeprefix(f"{files[0]}: "))


def _arrays(files: Sequence[Path], minus: Path | None, bar: "Bar", opened: ExitStack) -> "list[Stored]":
    """Open the files of one update and return their arrays."""
    from gradclip._src.updates.files import difference, open_file

    parts = [opened.enter_context(open_file(file, bar.advance)) for file in files]
    if minus is not None:
        before = opened.enter_context(open_file(minus, bar.advance))
        parts = [difference(part, before) for part in parts]
    bar.expect(sum(part.size for part in parts))
    every = [(file, x) for file, part in zip(files, parts, strict=True) for x in part.arrays]
    times = Counter(x.name for _, x in every)
    names = Counter(file.name for file in files)
    return [
        Renamed(f"{file.name if names[file.name] == 1 else file}: {x.name}", x) if times[x.name] > 1 else x
        for file, x in every
    ]


@dataclass
class Bar:
    """A progress bar on the standard error, which only a terminal shows. It is made when the first bytes are read."""

    name: str
    total: int = 0
    shown: Any = None

    def expect(self, total: int) -> None:
        """Say how many bytes will be read."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = Console(stderr=True)
        if console.is_terminal:
            text = TextColumn("{task.description}", markup=False)
            columns = text, BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self.shown = Progress(*columns, console=console, transient=True)
            self.shown.add_task(self.name, total=total)
            self.shown.start()

    def advance(self, count: int) -> None:
        """Count bytes that have been read."""
        if self.shown is not None:
            self.shown.advance(0, count)


@contextmanager
def _bar(name: str) -> Iterator[Bar]:
    bar = Bar(printable(name, 80))
    try:
        yield bar
    finally:
        if bar.shown is not None:
            bar.shown.stop()


def _told(
    files: Sequence[Path], answers: Iterable[A], asked: dict[str, float], *, as_json: bool, together: bool
) -> list[A]:
    """Print each answer in a line as soon as it is known, or all as JSON, and return them."""
    found = []
    for label, one in zip([f"{len(files)} files"] if together else files, answers, strict=True):
        found.append(one)
        if not as_json:
            typer.echo(printable(f"{label}: {one}"))
    if as_json:
        names: list[dict[str, Any]] = [{"files": [*map(str, files)]}] if together else [{"file": str(x)} for x in files]
        typer.echo(to_json([name | asked | vars(one) for name, one in zip(names, found, strict=True)], indent=2))
    return found


def _exit(fine: bool) -> None:
    if not fine:
        raise typer.Exit(1)
