"""Results of each seed and each run, computed from the measured curves."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gradclip.demo.settings import DemoSettings

GUESSING_LOSS = math.log(10)
LEARNED_LOSS = GUESSING_LOSS / 2

Outcome = Literal["learned", "not learned", "diverged"]


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
