"""The commands that read files of arrays. The code that does the work is imported only when a command runs."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradclip.cli.logs import fail

if TYPE_CHECKING:
    from gradclip.backends.host.arrays import HostArray
    from gradclip.checks.judge import Measurement
    from gradclip.checks.template import Slot
    from gradclip.checks.verdict import UpdateCheck
    from gradclip.core.norms import Order
    from gradclip.files import Stored

_FILES = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="safetensors, the index of sharded safetensors, .npz, .npy, or PyTorch's .pt.",
        show_default=False,
    ),
]
_ORD = Annotated[str, typer.Option("--ord", help="The order of the norm: a number from 1 to 8, inf or -inf.")]
_WHOLE_ORD = Annotated[str, typer.Option("--ord", help="The order of the norm: a whole number from 1 to 8, inf or -inf.")]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON: a list with an object for each file.")]
_TOGETHER = Annotated[bool, typer.Option("--together", help="All files are the parts of one update.")]
_MINUS = Annotated[
    Path | None,
    typer.Option("--minus", help="Measure each FILE minus this one, as an update of weights.", show_default=False),
]
_MAX_NORM = Annotated[
    float, typer.Option("--max-norm", help="The threshold, as a float: 0.1 is Python's 0.1.", show_default=False)
]
_LIKE = Annotated[
    Path | None,
    typer.Option(
        "--like",
        help="A file whose names, shapes and dtypes each update must have. Its values are not read.",
        show_default=False,
    ),
]

Progress = Callable[[int], object]


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
    from gradclip.checks.judge import measure
    from gradclip.core.accumulators import check_order

    order = _order(ord, check_order)
    _check_there([*files, *([minus] if minus else [])])
    if minus is not None and together:
        fail("--minus subtracts one file from each FILE. Leave out --together.", 2)
    found = [_judged(some, minus, lambda arrays: measure(arrays, order), _unmeasured) for some in _groups(files, together)]
    _print(files, together, found, as_json, lambda one: _norm_in_words(one), lambda one: {**vars(one), "ord": order.p})
    _exit(bool(one.faults) for one in found)


def check(
    files: _FILES,
    max_norm: _MAX_NORM,
    like: _LIKE = None,
    ord: _WHOLE_ORD = "2",
    as_json: _JSON = False,
    together: _TOGETHER = False,
) -> None:
    """Say whether the update in each file is acceptable, and if not, why. Exits with 1 if one is not.

    An update is refused if its norm, in exact arithmetic, exceeds the threshold, if it holds NaN or infinities, or if it
    differs from --like. Files of any size are read piece by piece.
    """
    from gradclip.checks.judge import checked_order, judge

    order = _order(ord, checked_order)
    if not max_norm >= 0:
        fail(f"--max-norm must not be negative or NaN, got {max_norm!r}.", 2)
    _check_there([*files, *([like] if like else [])])
    template = None if like is None else _template(like)

    def judged(arrays: "Sequence[Stored]") -> "UpdateCheck":
        return judge(arrays, max_norm, order, template, advice="--like")

    found = [_judged(some, None, judged, _refused) for some in _groups(files, together)]
    _print(files, together, found, as_json, _verdict_in_words, lambda one: {**vars(one), "max_norm": max_norm, "ord": order.p})
    _exit(not one.ok for one in found)


def _judged(files: Sequence[Path], minus: Path | None, judge: Callable[..., Any], failed: Callable[[str], Any]) -> Any:
    """Return what `judge` says of the arrays in files; what `failed` says of the error if they cannot be read."""
    from gradclip.checks.verdict import in_one_line

    try:
        with _progress(", ".join(file.name for file in files)) as bar, ExitStack() as opened:
            return judge(_arrays(files, minus, bar, opened))
    except Exception as error:  # whatever a file makes its readers raise, the other files are judged
        return failed(in_one_line(error))


def _arrays(files: Sequence[Path], minus: Path | None, bar: Any, opened: ExitStack) -> "list[Stored]":
    """Open files and return their arrays."""
    from gradclip.files import difference, open_file

    found = [opened.enter_context(open_file(file, bar.advance)) for file in files]
    if minus is not None:
        before = opened.enter_context(open_file(minus, bar.advance))
        found = [difference(one, before) for one in found]
    bar.expect(sum(one.size for one in found))
    names = [x.name for one in found for x in one.arrays]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return [Renamed(f"{_short(f, files)}: {x.name}", x) if x.name in twice and len(files) > 1 else x for f, one in zip(files, found, strict=True) for x in one.arrays]


def _short(file: Path, files: Sequence[Path]) -> str:
    """Return the name of a file, or its path if another has the same name."""
    return str(file) if sum(one.name == file.name for one in files) > 1 else file.name
