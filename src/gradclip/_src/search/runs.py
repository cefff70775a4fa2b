"""Run short trainings, in this process or in several, and report what goes wrong with the arguments of the run."""

import math
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

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
