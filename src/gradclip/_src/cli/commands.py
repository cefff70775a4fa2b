"""The commands and their options. The code that does the work is imported only when a command runs."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gradclip._src.cli import INSTALL, files, logs
from gradclip._src.demo.settings import DemoSettings, as_text, rates_from
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
def demo(
    steps: Annotated[int, typer.Option(help="Training steps in each run.")] = DemoSettings.steps,
    seeds: Annotated[int, typer.Option(help="Runs with each learning rate, with seeds 0, 1, ...")] = DemoSettings.seeds,
    rates: Annotated[
        str, typer.Option(help="Learning rates at the first step. They fall to 0 along a cosine.")
    ] = as_text(DemoSettings.rates),
    max_norm: Annotated[float, typer.Option(help="The fixed threshold.")] = DemoSettings.max_norm,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = DemoSettings.out,
) -> None:
    """Train a recurrent network on handwritten digits: without clipping, with a fixed and an adaptive threshold.

    Each is trained at several learning rates, and the picture shows which rates work.
    All share the seeds, the data, the network and the optimizer. Only the clipping differs.
    """
    try:
        settings = DemoSettings(steps, seeds, rates_from(rates), max_norm, out)
    except ValueError as error:
        _fail(str(error), 2)
    try:
        from gradclip._src.demo.run import run_demo

        run_demo(settings)
    except OSError as error:
        _fail(f"could not write to {str(out)!r}: {error}. Pass a different folder with --out.", 2)
    except ModuleNotFoundError as error:
        # A missing module of gradclip is a bug: show it instead of asking to install it.
        missing = (error.name or "gradclip").partition(".")[0]
        if missing == "gradclip":
            raise
        _fail(f"The demo needs {missing}, not installed here. To install it: {INSTALL}", 1)


@app.command()
def info() -> None:
    """Show which compiled kernels are in use, and the versions of gradclip, Python and the libraries it works with."""
    typer.echo(info_text())


app.command()(logs.advise)
app.command()(logs.replay)
app.command()(files.norm)
app.command()(files.check)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
