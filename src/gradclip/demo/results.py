"""Results of each seed and each run, computed from the measured curves: as numbers, a sentence and a table."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from gradclip.demo.settings import DemoSettings

GUESSING_LOSS = math.log(10)
LEARNED_LOSS = GUESSING_LOSS / 2

Outcome = Literal["learned", "not learned", "diverged"]
_ANSWERS = {
    "learned": "[green]yes",
    "not learned": "[yellow]no",
    "diverged": "[red]diverged",
}


class Curves(NamedTuple):
    """Measurements: loss, norm before clipping and threshold as (seeds, steps), accuracy as (seeds,)."""

    losses: np.ndarray
    norms: np.ndarray
    max_norms: np.ndarray
    test_accuracy: np.ndarray


@dataclass(frozen=True)
class SeedResult:
    """One seed of one run. Steps count from 1; None means it never happened."""

    seed: int
    outcome: Outcome
    test_accuracy: float
    final_loss: float | None
    nonfinite_loss_steps: int
    largest_finite_norm: float | None
    first_nonfinite_norm_step: int | None
    clipped_share: float


@dataclass(frozen=True)
class RunResult:
    """One run: its curves and the result of each seed."""

    name: str
    curves: Curves
    seeds: tuple[SeedResult, ...]

    @property
    def median_test_accuracy(self) -> float:
        """The median test accuracy over the seeds."""
        return float(np.median([seed.test_accuracy for seed in self.seeds]))

    def count(self, outcome: Outcome) -> int:
        """Return how many seeds ended this way."""
        return sum(seed.outcome == outcome for seed in self.seeds)


def describe_run(name: str, curves: Curves) -> RunResult:
    """Compute the results of a run from its curves."""
    seeds = (
        _describe_seed(seed, losses, norms, max_norms, float(correct))
        for seed, (losses, norms, max_norms, correct) in enumerate(zip(*curves, strict=True))
    )
    return RunResult(name, curves, tuple(seeds))


def _describe_seed(
    seed: int, losses: np.ndarray, norms: np.ndarray, max_norms: np.ndarray, correct: float
) -> SeedResult:
    finite = norms[np.isfinite(norms)]
    broken = np.flatnonzero(~np.isfinite(norms))
    last = losses[-max(1, len(losses) // 10) :]
    final_loss = float(last.mean()) if np.isfinite(last).all() else None
    return SeedResult(
        seed=seed,
        outcome=_outcome(final_loss),
        test_accuracy=correct,
        final_loss=final_loss,
        nonfinite_loss_steps=int((~np.isfinite(losses)).sum()),
        largest_finite_norm=float(finite.max()) if finite.size else None,
        first_nonfinite_norm_step=int(broken[0]) + 1 if broken.size else None,
        clipped_share=float((np.isfinite(norms) & (norms > max_norms)).sum() / len(norms)),
    )


def _outcome(final_loss: float | None) -> Outcome:
    if final_loss is None:
        return "diverged"
    return "learned" if final_loss < LEARNED_LOSS else "not learned"


def summarise(plain: RunResult, clipped: RunResult, adaptive: RunResult, settings: DemoSettings) -> str:
    """Sum up the runs in one sentence."""
    return (
        f"Without clipping, {_tally(plain)}; with gradclip at max_norm {settings.max_norm:g}, {_tally(clipped)}; with "
        f"a threshold that follows the norms, {_tally(adaptive)}; all after {settings.steps} steps at learning rate "
        f"{settings.learning_rate:g}."
    )


def _tally(run: RunResult) -> str:
    correct = [seed.test_accuracy for seed in run.seeds]
    diverged = f" and {run.count('diverged')} diverged" if run.count("diverged") else ""
    return (
        f"{run.count('learned')} of {len(run.seeds)} seeds learned{diverged} (test accuracy "
        f"{min(correct):.1%} to {max(correct):.1%}, median {run.median_test_accuracy:.1%})"
    )


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
