"""Lines of text: tables, and what programs print: Megatron-LM, torchtitan, Hugging Face's Trainer, and the like."""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from gradclip._src.logs.files import lines
from gradclip._src.logs.json_files import BEFORE_CLIPPING, TRAINER_DEFAULT, no_norm
from gradclip._src.logs.rows import (
    OF_A_RUN,
    Keys,
    Log,
    LogError,
    Row,
    below_zero,
    check_count,
    check_point,
    counted,
    norm_or_nan,
    number,
    plain,
    rows_of,
)
from gradclip._src.words import listed

_KINDS = {
    ",": "a table (CSV)",
    ";": "a table (CSV with semicolons)",
    "\t": "a table (CSV with tabs)",
}
_OF_A_MESSAGE = re.compile(r"\[(?:INFO|DEBUG|WARNING|ERROR)\]")
COMMENT = "#"  # begins lines before the names of columns
_AROUND = ",; \t\r\n\"'"
_APART = re.compile(r"[,;\s\"']+")
_BOUNDS = ("__MIN", "__MAX")  # columns that Weights & Biases adds
_RUNS = ("run", "run_id", "run_name", "name", "seed", "trial", "trial_id", "experiment")


def columns_of(first: str) -> tuple[list[str], str] | None:
    """Return the names in the first line of a table, and what separates them; None if it is no table."""
    found = [([name.strip() for name in _names(first, one)], one) for one in _KINDS]
    names, separator = max(found, key=lambda one: len(one[0]))
    if _OF_A_MESSAGE.search(first):
        return None
    return (names, separator) if len(names) > 1 or (names and plain(names[0]) == "grad_norm") else None


def holds_numbers(first: str) -> bool:
    """Say whether a line holds nothing but numbers, so that it names no columns."""
    return all(number(one) is not None for one in _APART.split(first.strip(_AROUND)))


def without_names(path: Path, first: str) -> LogError:
    """Return the error for a table whose first line is one of numbers."""
    names = "step,grad_norm,loss" if _APART.search(first.strip(_AROUND)) else "grad_norm"
    return LogError(
        f"{path} begins with numbers, so it does not say which of them are norms. Put the names of its columns in a "
        f"first line, such as {names}."
    )


class _Runs:
    """The runs in a table with columns that name them. To read one, the key is such as `run-7 - grad_norm`."""

    def __init__(self, names: Sequence[str], key: str | None) -> None:
        self.columns = [name for name in names if plain(name) in _RUNS]
        self.asked, self.key = None, key
        if self.columns and key is not None and key not in names and OF_A_RUN in key:
            self.asked, _, self.key = key.rpartition(OF_A_RUN)
        self._steps: dict[str, list[Any]] = {}

    def read(self, entries: Iterable[dict[str, str]], keys: Keys) -> Iterator[dict[str, str]]:
        """Yield the entries of the run that is asked for, or all."""
        for one in entries:
            run = "/".join(one.get(column, "").strip() for column in self.columns)
            if number(one.get(keys.norm)) is not None:
                self._steps.setdefault(run, []).append(one.get(keys.step or ""))
            if self.asked in (None, run):
                yield one

    def check(self, path: Path, keys: Keys) -> None:
        """Raise LogError if there are several runs, of which none was named: two have a step, or each has many rows."""
        each = [{*steps} if keys.step else range(len(steps) - 1) for steps in self._steps.values()]
        several = len(each) > 1 and (sum(map(len, each)) > len({*chain(*each)}) if keys.step else all(map(len, each)))
        if several if self.asked is None else self.asked not in self._steps:
            runs = listed([f'"{run}{OF_A_RUN}{keys.norm}"' for run in self._steps], " or ")
            what = "several runs" if self.asked is None else f'no run "{self.asked}"'
            raise LogError(f"{path} has {what}, by its column {' and '.join(self.columns)}. Pass --key {runs}.")


def is_table(names: Sequence[str], key: str | None) -> bool:
    """Say whether one of the columns is the norm. Raises LogError if several may be."""
    return Keys.among(names, _Runs(names, key).key) is not None


def of_table(path: Path, key: str | None) -> Log:
    """Read a table whose first line names the columns."""
    every = lines(path)
    first = next((line for line in every if line.strip() and not line.startswith(COMMENT)), "")
    found = columns_of(first)
    if found is None:
        raise no_norm(path, (), key)
    names, separator = found
    runs = _Runs(names, key)
    keys = Keys.among([name for name in names if not name.endswith(_BOUNDS)], runs.key)
    if keys is None:
        raise no_norm(path, names, key)
    unread: list[csv.Error] = []
    entries = (dict(zip(names, one, strict=False)) for one in _entries(every, separator, unread))
    rows, left_out = rows_of(runs.read(entries, keys), keys, names)
    runs.check(path, keys)
    if not rows:
        raise no_norm(path, names, keys.norm)
    notes = (counted(len(unread), "row could", "rows could") + f" not be read: {unread[0]}.",) if unread else ()
    return Log(_KINDS[separator], rows, notes=notes + left_out)


def _names(first: str, separator: str) -> list[str]:
    return next(_entries([first], separator, []), [])


def _entries(every: Iterable[str], separator: str, unread: list[csv.Error]) -> Iterator[list[str]]:
    """Yield the rows that can be read; keep the errors of the others."""
    rows = csv.reader(every, delimiter=separator, skipinitialspace=True)
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            unread.append(error)


_THOUSANDS = r"[1-9]\d{0,2}(?:,\d{3}){1,100}(?:\.\d+)?(?!\d)"
_NUMBER = (
    rf"([-+]?(?:{_THOUSANDS}|"
    + r"\d{1,400},\d+(?!\d|,\d)|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?))"
)
_BETWEEN = r"""['"]?\s{0,20}[:=]\s{0,20}['"]?(?:(?:np\.float\d{2}|(?:torch\.)?tensor)\()?"""
_SPACED = r"[ \t]{1,20}(?=[-+]?(?:\d{1,400}\.\d|\d{1,400}e[-+]?\d|(?:nan|inf)\b))"  # "grad norm 1" may be of a sentence
_APART_OR_SPACED = f"(?:{_BETWEEN}|{_SPACED})"
_NAME = r"(?<![a-z_])(?<!max )(?<!clip )(?:(?:train|total|global)[ _])?(?:grad(?:ient)?[ _-]?norm|gnorm)"
_NORM = re.compile(_NAME + _APART_OR_SPACED + _NUMBER, re.I)
_LOSS = re.compile(r"(?<![a-z_/])(?:lm[ _]|train(?:ing)?[ _])?loss" + _APART_OR_SPACED + _NUMBER, re.I)
_OF_GROUPS = re.compile(_NAME + r"['\"]?\s{0,20}[:=]\s{0,20}\{([^{}]{1,2000})\}", re.I)
_QUARTILES = re.compile(_NAME + r" quartiles((?:\s{1,4}[-+.\w]{1,40}){5})", re.I)
_ALONE = re.compile(r"(?:^|[|,;])\s{0,20}norm" + _APART_OR_SPACED + _NUMBER, re.I)  # in a line with a loss
_MEGATRON = re.compile(r"\biteration\s{1,20}(\d{1,16})\s{0,20}/", re.I)
_STEP = re.compile(
    r"\b(?:global[ _])?(?:step|iter(?:ation)?|num_update)s?['\"]?\s{0,20}[:= ]\s{0,20}['\"]?(\d{1,16})\b", re.I
)
_THRESHOLD = re.compile(r"\bthreshold=" + _NUMBER, re.I)
_PLACE_IN_CODE = re.compile(r"(?<![\w.<>])[\w.<>]{1,200}:[\w<>]{1,200}:\d{1,9} - ")  # as loguru prints it
_SKIPPED = re.compile(r"number of skipped iterations:\s{0,20}(\d{1,16})")
_COLOURS = re.compile(r"(?:\x1b\[[0-9;]{0,20}|\[[0-9;]{1,20})m")
_SETTING = re.compile(
    r"\b(?:clip_grad|max_norm|max_grad_norm|gradient_clipping)\b['\"]?\s{0,20}[:=. ][\s.:=]{0,80}" + _NUMBER, re.I
)
_DEEPSPEED = re.compile(r"\bstep=\d{1,16}, skipped=\d")
_LONGEST = 2**16


class _Program(NamedTuple):
    """A program: its name, and the default of its threshold."""

    name: str
    default: float


_MEGATRON_LM = _Program("text of Megatron-LM", 1.0)
_TORCHTITAN = _Program("text of torchtitan", 1.0)
_TRAINER = _Program("text of Hugging Face's Trainer", TRAINER_DEFAULT)
_OTHER = _Program("text", math.nan)


def holds_norm(line: str) -> bool:
    """Say whether a line of text holds a norm."""
    plain_line = _COLOURS.sub("", line[:_LONGEST])
    return any(_norm_in(plain_line, pattern) is not None for pattern in _PATTERNS)


def of_text(path: Path, key: str | None) -> Log:
    """Read the lines that hold a norm; also the threshold, if the program printed its settings before."""
    for pattern in _PATTERNS if key is None else (_named(key),):
        rows, seen = _rows_and_more(path, pattern)
        if rows:
            break
    else:
        raise _without_norms(path) if seen.of_deepspeed and key is None else no_norm(path, (), key)
    assumed, known = math.isnan(seen.threshold), seen.program is not _OTHER
    threshold = seen.program.default if assumed else seen.threshold
    measured = BEFORE_CLIPPING if known else ""
    notes = (*seen.notes(), *((_SAID[pattern],) if pattern in _SAID else ()))
    return Log(seen.program.name, rows, threshold, assumed and known, measured, notes)


_PATTERNS = (_NORM, _OF_GROUPS, _QUARTILES, _ALONE)
"""Kinds of lines with a norm. The next counts if no line of the log is of those before."""
_SAID = {
    _OF_GROUPS: "Each norm is that of all groups in its line together.",
    _QUARTILES: "Each norm is the median of several steps: spikes between them do not show.",
}


def _norm_in(line: str, pattern: re.Pattern[str]) -> str | None:
    """Return the norm that a line of this kind holds, as text; None without one."""
    match = pattern.search(line)
    if match is None or (pattern is _ALONE and not _LOSS.search(line)):
        return None
    if pattern is _OF_GROUPS:
        parts = [number(one.rpartition(":")[2]) for one in match[1].split(",")]
        return None if None in parts else repr(math.hypot(*parts))  # type: ignore[arg-type]
    return match[1].split()[2] if pattern is _QUARTILES else match[1]


def _rows_and_more(path: Path, pattern: re.Pattern[str]) -> tuple[list[Row], "_Seen"]:
    rows: list[Row] = []
    seen = _Seen()
    for line in _plain(path):
        norm = _norm_in(line, pattern)
        seen.look(line, norm, first=not rows)
        if norm is not None:
            threshold = _THRESHOLD.search(line) if pattern is _QUARTILES else None
            rows.append(_row(line, norm, threshold))
            check_count(len(rows))
    return rows, seen


@dataclass
class _Seen:
    """What a text says beside its norms.

    Attributes:
        threshold: the last that it names before the norms; NaN if it names none.
        named: all thresholds that it names.
        comma: a norm whose comma is read as one of thousands, but may be a decimal comma.

    """

    program: _Program = _OTHER
    threshold: float = math.nan
    named: dict[float, None] = field(default_factory=dict)
    skipped: int = 0
    below_zero: int = 0
    comma: str = ""
    of_deepspeed: bool = False

    def look(self, line: str, norm: str | None, *, first: bool) -> None:
        """Look at a line; `first`: no line with a norm was before it."""
        if match := _SKIPPED.search(line):
            self.skipped += int(match[1])
        if norm is not None:
            self.program = _program_of(line) if first else self.program
            self.below_zero += norm.startswith("-")
            self.comma = self.comma or (norm if "," in norm and "." not in norm else "")
            return
        self.of_deepspeed = self.of_deepspeed or _DEEPSPEED.search(line) is not None
        if match := _SETTING.search(line):
            value = _value(match[1])
            self.named[value] = None
            self.threshold = value if first else self.threshold

    def notes(self) -> tuple[str, ...]:
        """Return sentences on what was taken where the text leaves a choice."""
        found = ["The program skipped " + counted(self.skipped, "step.", "steps.")] if self.skipped else []
        if len(self.named) > 1:
            none = math.isnan(self.threshold)
            which = "none before the first norm, so none counts" if none else f"{self.threshold:g} counts"
            found.append(f"The log names several thresholds, {listed([f'{one:g}' for one in self.named])}: {which}.")
        if self.comma:
            found.append(f"The comma in {self.comma} is read as one of thousands.")
        return (*found, *below_zero(self.below_zero))


def _without_norms(path: Path) -> LogError:
    return LogError(
        f"{path} has no norms of gradients: DeepSpeed prints none. To record them, call "
        "gradclip.clip_at_step(engine, max_norm, monitor=monitor), and read what Monitor.save writes."
    )


def _plain(path: Path) -> Iterator[str]:
    for line in lines(path):
        # A progress bar ends its lines with carriage returns.
        for part in line[:_LONGEST].split("\r"):
            yield _PLACE_IN_CODE.sub("", _COLOURS.sub("", part), count=1)


def _named(key: str) -> re.Pattern[str]:
    return re.compile(r"(?<![\w])" + re.escape(key) + _APART_OR_SPACED + _NUMBER, re.I)


def _row(line: str, norm: str, threshold: re.Match[str] | None) -> Row:
    step = _MEGATRON.search(line) or _STEP.search(line)
    loss = _LOSS.search(line)
    return Row(
        int(step[1]) if step else None,
        norm_or_nan(_value(norm)),
        _value(loss[1]) if loss else math.nan,
        _value(threshold[1]) if threshold else math.nan,
    )


def _value(text: str) -> float:
    if not re.fullmatch(r"[-+]?" + _THOUSANDS, text):
        check_point(text)
    found = number(text.replace(",", ""))
    return math.nan if found is None else found


def _program_of(line: str) -> _Program:
    if _MEGATRON.search(line):
        return _MEGATRON_LM
    if re.search(r"\bstep:\s{0,20}\d{1,16}\s{1,20}loss:", line):
        return _TORCHTITAN
    if re.search(r"['\"]grad_norm['\"]", line) and re.search(r"['\"]learning_rate['\"]", line):
        return _TRAINER
    return _OTHER
