"""The results as a table for the terminal."""

import numpy as np
from rich import box
from rich.table import Table

from gradclip.demo.results import LEARNED_LOSS, RunResult, SeedResult

_ANSWERS = {
    "learned": "[green]yes",
    "not learned": "[yellow]no",
    "diverged": "[red]diverged",
}


def results_table(runs: tuple[RunResult, ...]) -> Table:
    """Return a table with one row per seed of each run, and the median of each run."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        caption=f"Learned: the mean loss of the last tenth of the steps is below {LEARNED_LOSS:.2f},\n"
        "half the loss of guessing. Norms are before clipping.",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    table.add_column("learned", no_wrap=True)
    for heading in (
        "test\naccuracy",
        "nonfinite\nlosses",
        "largest\nnorm",
        "nonfinite\nnorm from",
        "steps\nclipped",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        _add_run(table, run)
    return table


def _add_run(table: Table, run: RunResult) -> None:
    table.add_row(run.name, style="bold")
    for seed in run.seeds:
        table.add_row(*_cells(seed))
    shares = [seed.clipped_share for seed in run.seeds]
    table.add_row(
        "  median",
        "",
        f"{run.median_test_accuracy:.1%}",
        f"{np.median([seed.nonfinite_loss_steps for seed in run.seeds]):g}",
        "",
        "",
        f"{np.median(shares):.0%}",
        style="bold",
        end_section=True,
    )


def _cells(seed: SeedResult) -> tuple[str, ...]:
    largest, first = seed.largest_finite_norm, seed.first_nonfinite_norm_step
    return (
        f"  seed {seed.seed}",
        _ANSWERS[seed.outcome],
        f"{seed.test_accuracy:.1%}",
        str(seed.nonfinite_loss_steps),
        "none" if largest is None else f"{largest:.3g}",
        "never" if first is None else f"step {first}",
        f"{seed.clipped_share:.0%}",
    )
