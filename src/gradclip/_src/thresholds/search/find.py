"""`find_max_norm`: try thresholds and learning rates with a short training, and say which threshold is best."""

from __future__ import annotations

import math
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradclip._src.public import public
from gradclip._src.thresholds.search.trials import Trial, middle_of, plateau_of
from gradclip._src.words import shown, with_advice

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any


@public
@dataclass(frozen=True)
class MaxNormSearch:
    """What `gradclip.find_max_norm` found. Print it for the table.

    Attributes:
        table: one `Trial` for each learning rate and threshold, in this order, both ascending: `max_norm`,
            `learning_rate`, `losses` (one for each seed), `loss` (their mean, infinity if one is NaN), `diverged`.
        seeds: the seeds.

    """

    table: tuple[Trial, ...]
    seeds: tuple[int, ...]

    @property
    def plateau(self) -> tuple[Trial, ...]:
        """The best trial and its neighbours in threshold that are about as good; empty if every trial diverged.

        They exceed the lowest loss by at most two standard errors, or 1% of it, or 1% of the distance to the 75th
        percentile of all losses, if that is at most 10% of it.
        """
        return plateau_of(self.table)

    @property
    def best(self) -> Trial | None:
        """The middle of the plateau; of two in the middle, the one with the lower loss. None if all diverged."""
        return middle_of(self.plateau)

    @property
    def max_norm(self) -> float | None:
        """The best threshold: the middle of the plateau. None if every trial diverged."""
        return self.best and self.best.max_norm

    @property
    def learning_rate(self) -> float | None:
        """The learning rate that the best threshold belongs to; None if no rates were tried, or all diverged."""
        return self.best and self.best.learning_rate

    def __str__(self) -> str:
        best, plateau = self.best, self.plateau
        rates = self.table[0].learning_rate is not None
        seeds = "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        lines = [_proposal(best), f"{'learning rate':>14}" * rates + f"{'max_norm':>10}{'mean loss':>12}  of {seeds}"]
        for trial in self.table:
            rate = f"{trial.learning_rate:>14.4g}" if trial.learning_rate is not None else ""
            loss = f"{trial.loss:>12.4g}" if not trial.diverged else f"{'diverged':>12}"
            mark = "  best" if trial is best else "  about as good" if trial in plateau else ""
            if trial.diverged and len(self.seeds) > 1:
                mark = f"  {trial.diverged} of {len(self.seeds)} seeds"
            lines.append(f"{rate}{trial.max_norm:>10.4g}{loss}{mark}")
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        """Say where the search was too narrow to trust its end."""
        plateau, row = self.plateau, [t.max_norm for t in self.table if t.learning_rate == self.learning_rate]
        if not plateau or len(row) == 1:
            return []
        low, high = plateau[0].max_norm == row[0], plateau[-1].max_norm == row[-1]
        if low and high:
            return ["At this learning rate, all thresholds are about as good."]
        if low and row[0] > 0:
            return ["The lowest threshold is among the best: try lower ones too."]
        return ["The highest threshold is among the best: try higher ones too."] if high and row[-1] < math.inf else []

    @with_advice
    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the mean loss over thresholds, one line for each learning rate. With a path, also save it there.

        Each dot is one seed. Raises ModuleNotFoundError if matplotlib is not installed.
        """
        from gradclip._src.thresholds.search.picture import draw

        figure = draw(self.table, self.best)
        if path is not None:
            figure.savefig(path)
        return figure


def _proposal(best: Trial | None) -> str:
    if best is None:
        return "Every training diverged. Try lower thresholds or learning rates."
    rate = "" if best.learning_rate is None else f", learning_rate = {best.learning_rate:g}"
    return f"max_norm = {best.max_norm:g}{rate}"


Train = Callable[..., object]
_AT_TOP_LEVEL = "Define train at the top level of a module, or pass workers=1."


class Run(NamedTuple):
    """The arguments of one training; `learning_rate` is None if no rates are tried."""

    max_norm: float
    learning_rate: float | None
    seed: int

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f", learning_rate={self.learning_rate:g}"
        return f"train(max_norm={self.max_norm:g}{rate}, seed={self.seed})"

    def final_loss(self, train: Train) -> float:
        """Train and return the final loss; NaN if it is not finite. Errors name the arguments."""
        rates = () if self.learning_rate is None else (self.learning_rate,)
        try:
            returned = train(self.max_norm, *rates, self.seed)
        except Exception as error:
            raise RuntimeError(f"{self} raised {type(error).__name__}: {error}") from error
        try:
            if isinstance(returned, str | bytes):
                raise TypeError("text is no number")
            # PyTorch warns of a tensor that is still part of a graph.
            loss = float(returned.detach() if hasattr(returned, "detach") else returned)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"{self} returned {shown(returned)}. It must return the final loss as one number: lower is better, NaN "
                "says that training diverged."
            ) from error
        return loss if math.isfinite(loss) else math.nan


class _Failed(NamedTuple):
    """An error in another process, as text: not every error can be sent from one process to another."""

    kind: type[Exception]
    message: str
    trace: str


def losses_of(train: Train, runs: Sequence[Run], workers: int) -> list[float]:
    """Return the final loss of each run. With several workers, processes are started anew ("spawn") for them.

    Raises TypeError if `train` cannot be sent to other processes, or returns no number; RuntimeError if it raises, or
    if a process ends early.
    """
    if workers == 1:
        return [run.final_loss(train) for run in runs]
    _check_can_be_sent(train)
    with ProcessPoolExecutor(min(workers, len(runs)), mp_context=get_context("spawn")) as pool:
        try:
            waiting = [pool.submit(_in_worker, train, run) for run in runs]
            return [_received(future.result()) for future in waiting]
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process ended before its training did. If this is a script, call find_max_norm below "
                '`if __name__ == "__main__":`. Otherwise train may have ended the process, for example for lack of '
                "memory: pass fewer workers."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_worker(train: Train, run: Run) -> float | _Failed:
    try:
        return run.final_loss(train)
    except (RuntimeError, TypeError) as error:
        return _Failed(type(error), str(error), traceback.format_exc())


def _received(result: float | _Failed) -> float:
    if isinstance(result, _Failed):
        error = result.kind(result.message)
        error.add_note(f"In the worker process:\n{result.trace}")
        raise error
    return result


def _check_can_be_sent(train: Train) -> None:
    try:
        sent = pickle.dumps(train)
    except Exception as error:
        raise TypeError(
            f"train cannot be sent to worker processes, got {shown(train)}: {error}. {_AT_TOP_LEVEL}"
        ) from error
    if b"__main__" in sent and not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file():
        raise TypeError(
            f"train cannot be sent to worker processes, got {shown(train)}, which was typed into a session or "
            f"notebook: they import it from a file. {_AT_TOP_LEVEL}"
        )


GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, math.inf)


@public
@with_advice
def find_max_norm(
    train: Train,
    candidates: Iterable[float] | None = None,
    *,
    learning_rates: Iterable[float] | None = None,
    seeds: int | Iterable[int] = 3,
    workers: int = 1,
) -> MaxNormSearch:
    """Train shortly with each threshold, and return which one is best.

    Args:
        train: a function `train(max_norm, seed)`, or with `learning_rates` `train(max_norm, learning_rate, seed)`. It
            trains from the start and returns the final loss, a number: lower is better, NaN or infinity means diverged.
            Use the mean of the last steps, or the loss on held-out data: the loss of one batch is mostly noise.
        candidates: the thresholds, numbers of at least 0, `math.inf` for no clipping. None: 0.01, 0.03, 0.1 and so on
            to 100, and `inf`. A short list is cheaper: `monitor.advise().try_values` of an unclipped run.
        learning_rates: the learning rates to try with each threshold, positive numbers; None passes none.
        seeds: how many seeds, then 0, 1, ... are passed; or the seeds.
        workers: how many trainings run at once, each in its own process. Processes import `train`, so define it at the
            top level of a module, and call this below `if __name__ == "__main__":`. 1 trains in this process.

    Returns:
        A `gradclip.MaxNormSearch` with `max_norm`, `learning_rate`, `table` and `plot`. The best threshold is not the
        one with the lowest loss but the middle of the plateau around it: at its edge, a little bad luck fails. The
        learning rate is that of the lowest mean loss. A threshold at which one seed diverges is never preferred.

    Raises:
        TypeError: `train` cannot be sent to processes, or returns no number. ValueError: a candidate, rate, seed or
        number of workers that cannot be used. RuntimeError: `train` raised; the message has its arguments. The training
        runs before it are lost.

    >>> import gradclip
    >>> train = lambda max_norm, seed: abs(max_norm - 1) + seed
    >>> found = gradclip.find_max_norm(train, [0.5, 1.0, 4.0], seeds=2)
    >>> found.max_norm, [trial.loss for trial in found.table]
    (1.0, [1.0, 0.5, 3.5])

    """
    if not callable(train):
        raise TypeError(f"train must be a function of a threshold and a seed, got {shown(train)}.")
    thresholds = _numbers("candidates", GRID if candidates is None else candidates, 0.0, math.inf)
    steps = (
        [None] if learning_rates is None else _numbers("learning_rates", learning_rates, 5e-324, 1.7976931348623157e308)
    )
    drawn = _seeds(seeds)
    if isinstance(workers, bool) or not isinstance(workers, Integral) or workers < 1:
        raise ValueError(f"workers must be a whole number of at least 1, got {shown(workers)}.")
    settings = [(max_norm, rate) for rate in steps for max_norm in thresholds]
    runs = [Run(max_norm, rate, seed) for max_norm, rate in settings for seed in drawn]
    losses = losses_of(train, runs, int(workers))
    each = len(drawn)
    table = (Trial(*one, tuple(losses[each * place : each * (place + 1)])) for place, one in enumerate(settings))
    return MaxNormSearch(tuple(table), drawn)


def _numbers(name: str, values: Iterable[float], least: float, most: float) -> list[float]:
    """Return the values ascending, each once. Raises ValueError for one that is out of the range."""
    which = "numbers of at least 0" if least == 0 else "positive finite numbers"
    if isinstance(values, Real | str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of {which}, got {shown(values)}.")
    found = []
    for value in values:
        try:
            found.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name} must be {which}, got {shown(value)}.") from error
        if not least <= found[-1] <= most:
            raise ValueError(f"{name} must be {which}, got {shown(value)}.")
    if not found:
        raise ValueError(f"{name} must be a list of {which}, got none. Leave it out for the usual ones.")
    return sorted(set(found))


def _seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    given = range(seeds) if isinstance(seeds, Integral) and not isinstance(seeds, bool) else seeds
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else ()
    if not found or not all(isinstance(seed, Integral) and not isinstance(seed, bool) for seed in found):
        raise ValueError(f"seeds must be a number of at least 1, or a list of whole numbers, got {shown(seeds)}.")
    return tuple(int(seed) for seed in dict.fromkeys(found))
