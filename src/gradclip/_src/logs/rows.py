"""What is read from a log: a row for each logged step."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from gradclip._src.words import listed

T = TypeVar("T")
NORMS = (
    "grad_norm",
    "gradient_norm",
    "grad_norm_total",
    "total_grad_norm",
    "global_grad_norm",
    "gradient_global_norm",
    "global_gradient_norm",
    "gradnorm",
    "gnorm",
    "grad_2.0_norm_total",
    "grad_2_norm_total",
    "grad_gnorm",
    "gradients_default_optimizer_global_norm",
)
_LOSSES = ("loss", "lm_loss", "train_loss", "training_loss", "loss_train", "global_avg_loss", "loss_mean")
_STEPS = (
    *("step", "global_step", "_step", "iteration", "iter", "steps", "trainer_global_step", "global_step_max_steps"),
    *("num_updates", "training_iteration"),
)
_THRESHOLDS = ("max_norm", "max_grad_norm", "clip_threshold", "clip_grad")
BY_GRADCLIP = "grad_norm_clipped"
"""What gradclip's callbacks log beside the norm."""
OF_A_RUN = " - "
"""Between the name of a run and that of a column, as Weights & Biases writes it."""
MOST_ROWS = 2_000_000
_LARGEST_STEP = 2**53
_OF_EVALUATION = re.compile(r"(?:^|[/_ -])(?:eval|val|valid|validation|test)(?:[/_ -]|$)", re.I)
_DECIMAL_COMMA = re.compile(r"[-+]?\d{1,400},\d{1,400}(?:e[-+]?\d{1,4})?", re.I)
_FLAGS = {"true": 1.0, "false": 0.0}


class LogError(ValueError):
    """A log cannot be read. The message is one line."""


class Row(NamedTuple):
    """A logged step. `step` is None if the log does not number it; what is not logged is NaN."""

    step: int | None
    norm: float
    loss: float = math.nan
    max_norm: float = math.nan
    skipped: bool = False


class Log(NamedTuple):
    """The rows of a log in order, and what else it says.

    Attributes:
        kind: the format, in words.
        rows: those with a norm.
        max_norm: the threshold that the log names, or the default of the program that wrote it; NaN without either.
        assumed: whether that threshold is a default.
        measured: when the norms were measured, in words; empty if the format does not say.
        notes: sentences on what was left out.

    """

    kind: str
    rows: Sequence[Row]
    max_norm: float = math.nan
    assumed: bool = False
    measured: str = ""
    notes: tuple[str, ...] = ()


class Keys(NamedTuple):
    """Which entries of a row hold the norm, the loss, the step and the threshold; None if none does.

    `clipped` is the norm after clipping, as gradclip's callbacks log it: where it is lower, it is the threshold.
    """

    norm: str
    loss: str | None
    step: str | None
    max_norm: str | None
    skipped: str | None
    clipped: str | None = None

    @classmethod
    def among(cls, names: Iterable[str], asked: str | None) -> "Keys | None":
        """Find them among the names of entries; `asked` is the norm's, if the user names it. None without a norm.

        Raises LogError if several names may be the norm's.
        """
        names = list(names)
        norm = asked if asked is not None and asked in names else None if asked is not None else _norm_among(names)
        if norm is None:
            return None
        run = norm.rpartition(OF_A_RUN)[0]
        rest = [name for name in names if name != norm and name.rpartition(OF_A_RUN)[0] in ("", run)]
        beside = norm.rpartition("/")[0]
        near = sorted(rest, key=lambda name: name.rpartition("/")[0] != beside)  # of the same part of the run
        found = (_first(near, wanted) for wanted in (_LOSSES, _STEPS, _THRESHOLDS, ("skipped",), (BY_GRADCLIP,)))
        return cls(norm, *found)

    def twins(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return, for each name that is read, the others that mean the same."""
        fitting = {self.norm: NORMS, self.loss: _LOSSES, self.step: _STEPS, self.max_norm: _THRESHOLDS}
        found = [one for one in names if not _OF_EVALUATION.search(one)]
        return {
            name: [one for one in found if one != name and plain(one) in wanted]
            for name, wanted in fitting.items()
            if name is not None
        }

    def choice(self, seen: Mapping[str, int]) -> tuple[str, ...]:
        """Return a sentence on what was taken where several names fit. `seen`: how many numbers each has.

        One number among many norms is the mean of the run.
        """
        several = [one for one, times in seen.items() if times >= min(2, seen[self.norm])]
        taken = [f"{name}, not {listed(others)}" for name, others in self.twins(several).items() if others]
        return (f"Of entries that mean the same, these are read: {'; '.join(taken)}.",) if taken else ()

    def row(self, entries: Mapping[str, Any]) -> Row | None:
        """Return the row of a step; None if its norm is missing."""
        norm = number(entries.get(self.norm))
        if norm is None:
            return None
        loss, threshold, skipped = (
            number(entries.get(key)) if key is not None else None for key in (self.loss, self.max_norm, self.skipped)
        )
        step = whole(entries.get(self.step)) if self.step is not None else None
        if threshold is None and self.clipped is not None:
            threshold = lowered(norm, number(entries.get(self.clipped)))
        return Row(step, norm_or_nan(norm), _or_nan(loss), _or_nan(threshold), bool(skipped))


def rows_of(every: Iterable[Mapping[str, Any]], keys: Keys, names: Iterable[str]) -> tuple[list[Row], tuple[str, ...]]:
    """Return the rows of the entries that hold a norm, and sentences on the others and on what was taken.

    An entry without one may be of an evaluation.
    """
    rows: list[Row] = []
    strange, below, commas = 0, 0, list[str]()
    others = [one for each in keys.twins(names).values() for one in each]
    seen = Counter[str]()
    for entries in every:
        row, norm = keys.row(entries), entries.get(keys.norm)
        if row is not None:
            rows.append(row)
            check_count(len(rows))
            below += (number(norm) or 0) < 0
            for one in others:
                seen[one] += number(entries.get(one)) is not None
        elif norm is not None and str(norm).strip():
            strange += 1
            commas += [norm.strip()] if isinstance(norm, str) and _DECIMAL_COMMA.fullmatch(norm.strip()) else []
    if len(commas) > len(rows):
        check_point(commas[0])
    left_out = counted(strange, "norm is no number: it is", "norms are no numbers: they are") + " left out."
    seen[keys.norm] = len(rows)
    return rows, (*((left_out,) if strange else ()), *below_zero(below), *keys.choice(seen))


def below_zero(count: int) -> tuple[str, ...]:
    """Return a sentence on norms below 0, if there are any."""
    found = counted(count, "norm is below 0: it counts as", "norms are below 0: they count as") + " not finite."
    return (found,) if count else ()


def check_point(text: str) -> None:
    """Raise LogError for a number with a decimal comma."""
    if _DECIMAL_COMMA.fullmatch(text):
        raise LogError(f"the log has numbers with decimal commas, such as {text[:40]}. Write them with points.")


def _norm_among(names: Sequence[str]) -> str | None:
    for wanted in NORMS:
        alike = [name for name in names if plain(name) == wanted]
        if len(alike) > 1:
            shortest = [name for name in alike if name.casefold() in (wanted, f"train/{wanted}", f"train_{wanted}")]
            if len(shortest) != 1:
                raise LogError(f"several entries may be the norm: {listed(sorted(alike))}. Name one with --key.")
            return shortest[0]
        if alike:
            return alike[0]
    if {"norm", "max_norm"} <= set(names):  # of a gradclip.Monitor
        return "norm"
    return None


def _first(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    named = [name for name in names if not _OF_EVALUATION.search(name)]
    return next((name for one in wanted for name in named if name == one or plain(name) == one), None)


def plain(name: str) -> str:
    """Return a name without its prefix and its spelling: grad_norm for `train/Grad Norm` and for `run - grad-norm`.

    A name in parts is one of the norm's names, too: grad_norm_total for `grad/norm/total`.
    """
    last = name.rpartition(OF_A_RUN)[2]
    parts = last.replace("-", "_").replace(" ", "_").casefold().split("/")
    joined = "_".join(parts[-2:])
    for several in ("_".join(parts[-3:]), joined):
        if several in NORMS:
            return several
    return joined if joined in _STEPS else parts[-1].removeprefix("train_") if parts[-1] != "train_loss" else "loss"


def number(value: object) -> float | None:
    """Return a number that a log holds, also as text such as "nan"; None for what is none."""
    if isinstance(value, str):
        text = value.strip().casefold()
        if len(text) > 64:
            return None
        try:
            return _FLAGS[text] if text in _FLAGS else float(text)
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole(value: object) -> int | None:
    """Return the number of a step; None for what is none. A text such as "2/4389" is step 2."""
    if isinstance(value, str):
        value = value.partition("/")[0]
    found = number(value)
    return int(found) if found is not None and 0 <= found <= _LARGEST_STEP and found == int(found) else None


def lowered(norm: float, clipped: float | None) -> float | None:
    """Return the norm after clipping if it is lower than before; None if nothing was clipped, or all was skipped."""
    return clipped if clipped is not None and 0 < clipped < norm * (1 - 1e-4) else None


def bounded(found: Iterable[T | None]) -> Iterator[T]:
    """Yield what is found, without None. Raises LogError if that is more than memory should hold."""
    for count, one in enumerate((one for one in found if one is not None), 1):
        check_count(count)
        yield one


def check_count(count: int) -> None:
    """Raise LogError if so many rows are more than memory should hold."""
    if count > MOST_ROWS:
        raise LogError(f"the log has more than {MOST_ROWS:,} numbers to read. Pass a part of it.")


def norm_or_nan(norm: float) -> float:
    """Return a norm. Below 0, as DeepSpeed gives one that is not finite, it is NaN."""
    return norm if norm >= 0 else math.nan


def _or_nan(found: float | None) -> float:
    return math.nan if found is None else found


def numbered(rows: Sequence[Row]) -> tuple[Sequence[Row], int]:
    """Return the rows that have a step, and how many have none, or -1 if most have none: all are then counted.

    The place of a row is no step beside rows that have one: it may be the step of another row.
    """
    without = sum(row.step is None for row in rows)
    if not without:
        return rows, 0
    if 2 * without > len(rows):
        return [row._replace(step=place) for place, row in enumerate(rows, 1)], -1
    return [row for row in rows if row.step is not None], without


def in_order(rows: Sequence[Row]) -> tuple[Sequence[Row], int]:
    """Keep the last row of each step, and return them by step, and how many went.

    A run that goes on from a checkpoint logs some steps again.
    """
    if all((one.step or 0) < (after.step or 0) for one, after in pairwise(rows)):
        return rows, 0  # without a copy: there may be many
    of_step = {row.step or 0: row for row in rows}
    return [of_step[step] for step in sorted(of_step)], len(rows) - len(of_step)


def counted(count: int, one: str, many: str) -> str:
    """Return a number with the words for one, or for many, such as "1 line is" and "2 lines are"."""
    return f"{count:,} {one if count == 1 else many}"
