"""The commands and their options. The code that does the work is imported only when a command runs."""

from typing import Annotated

import typer

from gradclip._src.cli import files, logs
from gradclip._src.versions import info_text, version_text

app = typer.Typer(
    name="gradclip",
    help="Gradient clipping with one meaning for every framework.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def info() -> None:
    """Show which compiled kernels are in use, and the versions of gradclip, Python and the libraries it works with."""
    typer.echo(info_text())


app.command()(logs.advise)
app.command()(logs.replay)
app.command()(files.norm)
app.command()(files.check)
