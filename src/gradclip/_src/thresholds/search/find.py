"""`find_max_norm`: try thresholds and learning rates with a short training."""

from __future__ import annotations

import math
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

from gradclip._src.thresholds.search.result import MaxNormSearch
from gradclip._src.thresholds.search.trials import Trial
from gradclip._src.words import shown

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


def find_max_norm(
    train: Train,
    candidates: Iterable[float] | None = None,
    *,
    rates: Iterable[float] | None = None,
    seeds: int | Iterable[int] = 3,
    workers: int = 1,
) -> MaxNormSearch:
    """Train shortly with each threshold, and return which one is best.

    Args:
        train: a function `train(max_norm, seed)`, or with `rates` `train(max_norm, learning_rate, seed)`. It trains
            from the start and returns the final loss, a number: lower is better, NaN or infinity means diverged. Use
            the mean of the last steps, or the loss on held-out data: the loss of one batch is mostly noise.
        candidates: the thresholds, numbers of at least 0, `math.inf` for no clipping. None: 0.01, 0.03, 0.1 and so on
            to 100, and `inf`. A short list is cheaper: `monitor.advise().try_values` of an unclipped run.
        rates: the learning rates to try with each threshold, positive numbers; None passes none.
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
    steps = [None] if rates is None else _numbers("rates", rates, 5e-324, 1.7976931348623157e308)
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
