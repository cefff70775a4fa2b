"""The entry point, which works far enough without typer and rich to say that they are missing."""

import sys
from importlib.util import find_spec

from gradclip.cli import INSTALL


def main() -> None:
    """Run the command line, or say what to install for it."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(
            f"The gradclip command needs {' and '.join(missing)}, not installed here. "
            f"To install what it needs: {INSTALL}"
        )
    from gradclip.cli.commands import app

    app()
