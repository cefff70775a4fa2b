"""The entry point. Without typer and rich, it runs far enough to say that they are missing."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from gradclip._src.cli import INSTALL
from gradclip._src.versions import info_text, version_text

_WITHOUT_TYPER: dict[tuple[str, ...], Callable[[], str]] = {("info",): info_text, ("--version",): version_text}
DEMO = (
    "The demo is an example now: run `make demo` in a clone of gradclip, or see examples/gallery/loss_spike.py there."
)


def main() -> None:
    """Run the command line. If the output cannot be written, exit with a one-line error."""
    if sys.stdout is None:
        sys.exit("error: the output could not be written: standard output is closed.")
    try:
        try:
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Otherwise the rest of the buffer would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"error: the output could not be written: {error}.")


def _run(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["demo"]:
        print(DEMO, file=sys.stderr)
        sys.exit(2)  # as for any command that is not there
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if not missing:
        from gradclip._src.cli.commands import app

        app(prog_name="gradclip")
    elif tuple(arguments) in _WITHOUT_TYPER:
        print(_WITHOUT_TYPER[tuple(arguments)]())
    else:
        sys.exit(
            f"This command needs {' and '.join(missing)}, not installed here. To install: {INSTALL.format('cli')}. "
            f"These work without: {' and '.join('gradclip ' + ' '.join(words) for words in _WITHOUT_TYPER)}."
        )
