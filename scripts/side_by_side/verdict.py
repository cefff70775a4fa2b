"""Judge two answers: the same, ours better, or different."""

import math
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np

from side_by_side.cases import Case
from side_by_side.exact import DIGITS, Clamp, Norm, Numbers, Rule, Summed
from side_by_side.exact import Exact as Right
from side_by_side.formats import MOST, ULP, coarser, format_of, parts, spacing, written

KINDS = ("same", "better", "different")
SAME = 4.0  # units in the last place
# The largest error, in ulps, with which ours can still be better: a relative error of at least 1e-6.
NEAR = {name: max(SAME, 1e-6 / ulp) for name, ulp in ULP.items()}
# The largest error, in ulps, that our results are meant to have: some dozens in float64.
CLOSE = 128.0
ERRORS = ("ValueError", "TypeError")  # deliberate refusals of ours; other errors are faults
RightRule = Rule | Summed | Clamp | Norm


@dataclass(frozen=True)
class Answer:
    """What a call returned: the clipped leaves, and the norms if it returns them."""

    leaves: list[np.ndarray]
    norms: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Refusal:
    """What a call raised."""

    error: str
    message: str


class Verdict(NamedTuple):
    """`kind` is "same", "better" or "different"; `why` is one word; the rest shows one element of the answers."""

    kind: str
    why: str
    theirs: str
    ours: str
    exact: str


@dataclass
class Part:
    """The leaves or the norms of two answers, compared with the right ones. Distances are in ulps."""

    apart: float = 0.0
    theirs_off: float = 0.0
    ours_off: float = 0.0
    near: bool = True
    close: bool = True
    alike: bool = True  # for numbers without a right answer
    dtypes: tuple[str, str] = ("", "")  # of the first two arrays with different dtypes
    cells: tuple[str, str, str] = ("", "", "")
    _worst: float = -1.0

    def add(self, theirs: np.ndarray, ours: np.ndarray, exact: Numbers) -> None:
        """Compare two arrays, element by element."""
        if theirs.dtype != ours.dtype and not self.dtypes[0]:
            self.dtypes = theirs.dtype.name, ours.dtype.name
        name = coarser(format_of(theirs), format_of(ours))
        for their, our, right in zip(parts(theirs).tolist(), parts(ours).tolist(), exact, strict=True):
            self._add(their, our, right, name, (format_of(theirs), format_of(ours)))

    def _add(self, their: float, our: float, right: Decimal | None, name: str, names: tuple[str, str]) -> None:
        apart = 0.0 if their == our or (math.isnan(their) and math.isnan(our)) else distance(our, Decimal(their), name)
        if right is None:
            self.alike &= apart == 0.0
        else:
            self.theirs_off = max(self.theirs_off, distance(their, right, name))
            self.ours_off = max(self.ours_off, distance(our, right, name))
            self.near &= distance(our, right, name) <= NEAR[name]
            own = names[1] if names[0] == names[1] else coarser(names[1], "float32")
            self.close &= distance(our, right, own) <= CLOSE
        self.apart = max(self.apart, apart)
        if apart > self._worst:
            self._worst = apart
            self.cells = (
                written(their, names[0]),
                written(our, names[1]),
                "none" if right is None else written(right, names[1]),
            )


def distance(number: float, right: Decimal, name: str) -> float:
    """Return how far a number is from the right one, in ulps of a format.

    The distance of an infinity from a number above the format's largest one is 0.
    """
    if not math.isfinite(number) or not right.is_finite():
        beyond = (
            not right.is_nan()
            and math.isinf(number)
            and abs(right) > Decimal(MOST[name])
            and (number > 0) == (right > 0)
        )
        return 0.0 if beyond else math.inf
    with localcontext(DIGITS):
        return float(abs(Decimal(number) - right) / Decimal(spacing(abs(float(right)), name)))


def judge(theirs: Answer | Refusal, ours: Answer | Refusal, rule: RightRule, case: Case, defined: bool) -> Verdict:
    """Return the verdict on two answers to one call; `defined` says whether a right answer exists."""
    if isinstance(ours, Refusal) and ours.error not in ERRORS:
        return Verdict("different", "fault", getattr(theirs, "error", "numbers"), ours.error, "none")
    if isinstance(theirs, Refusal) and isinstance(ours, Refusal):
        return Verdict("same", "refused", theirs.error, ours.error, "none")
    right = _right(theirs if isinstance(ours, Refusal) else ours, rule, case, defined)
    if isinstance(ours, Refusal):
        return _refused_by_ours(theirs, ours, right, case)
    if isinstance(theirs, Refusal):
        return _refused_by_theirs(theirs, ours, right)
    shapes = [[x.shape for x in answer.leaves + answer.norms] for answer in (theirs, ours)]
    if shapes[0] != shapes[1]:
        return Verdict("different", "shapes", str(shapes[0]), str(shapes[1]), "none")
    excesses = [rule.excess(x.leaves, case.leaves, case.threshold) if defined else 0.0 for x in (theirs, ours)]
    leaves = _judged(_compared(theirs.leaves, ours.leaves, right.leaves), *excesses)
    norms = _judged(_compared(theirs.norms, ours.norms, right.norms), 0.0, 0.0)
    norms = norms._replace(theirs=f"norm {norms.theirs}", ours=f"norm {norms.ours}", exact=f"norm {norms.exact}")
    return max(leaves, norms, key=lambda v: KINDS.index(v.kind))


def _right(answer: Answer, rule: RightRule, case: Case, defined: bool) -> Right:
    """Return the right leaves, and the norms in the answer's shapes; None for each number without a right value."""
    exact = rule.exact(case.leaves, case.threshold) if defined else None
    leaves = exact.leaves if exact else [[None] * parts(x).size for x in answer.leaves]
    numbers = iter(exact.norms if exact else ())
    return Right(leaves, [[next(numbers, None) for _ in range(x.size)] for x in answer.norms])


def _compared(theirs: list[np.ndarray], ours: list[np.ndarray], right: list[Numbers]) -> Part:
    part = Part()
    for their, our, numbers in zip(theirs, ours, right, strict=True):
        part.add(their, our, numbers)
    return part


def _judged(part: Part, theirs_excess: float, ours_excess: float) -> Verdict:
    if ours_excess > 0.0:
        kind, why = "different", "bound"
    elif not part.alike:
        kind, why = "different", "no right answer"
    elif part.apart <= SAME:
        if part.dtypes[0] and part.close:
            return Verdict("different", "dtype", *part.dtypes, part.cells[2])
        kind, why = ("different", "far") if part.dtypes[0] else ("same", "same")
    elif part.near and part.ours_off < part.theirs_off:
        kind, why = "better", "nearer"
    elif part.close and theirs_excess > 0.0:
        kind, why = "better", "bound"
    else:
        kind, why = "different", "values" if part.close else "far"
    return Verdict(kind, why, *part.cells)


def _refused_by_ours(theirs: Answer, ours: Refusal, right: Right, case: Case) -> Verdict:
    """Ours is better if no right answer exists but the library returns numbers that are not all zero."""
    numbers = np.concatenate([parts(x) for x in theirs.leaves]) if theirs.leaves else np.zeros(0)
    nonsense = not case.answerable and (np.isfinite(numbers) & (numbers != 0)).any()
    part = _compared(theirs.leaves, theirs.leaves, right.leaves)
    return Verdict("better" if nonsense else "different", "refused", part.cells[0], ours.error, "none")


def _refused_by_theirs(theirs: Refusal, ours: Answer, right: Right) -> Verdict:
    part, norms = (_compared(x, x, y) for x, y in ((ours.leaves, right.leaves), (ours.norms, right.norms)))
    known = all(None not in numbers for numbers in right.leaves + right.norms)
    well = known and part.near and norms.near
    cells = part.cells if ours.leaves else norms.cells
    return Verdict("better" if well else "different", "answered", theirs.error, cells[1], cells[2])
