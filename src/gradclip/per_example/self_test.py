"""A self-test for sums of clipped gradients: does one example move the sum by no more than is promised?

Differential privacy rests on max ||f(D) - f(D')|| over all D and D' that differ in one example. No test finds that
maximum; this one looks for it where careless code has it, and measures each distance in exact arithmetic.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gradclip.backends.arrays import check_dtypes
from gradclip.backends.conversions import framework_of, numbers_of
from gradclip.backends.formats import bare_name, format_named
from gradclip.backends.registry import differentiating, load
from gradclip.core.exact import squared_distance
from gradclip.per_example.check_arguments import as_dtypes, as_promise, check_alike, check_settings, check_sums
from gradclip.per_example.clip import check_batch
from gradclip.per_example.function import ClippedFunction
from gradclip.per_example.hostile import CROWDS, KINDS, Room
from gradclip.per_example.kinks import Kinks, kinked, of_gradients, sizes, step_of, threshold_of
from gradclip.per_example.promise import Sensitivity
from gradclip.per_example.rounding import root_up
from gradclip.tree import FlatTree, flatten
from gradclip.typing import Dtype, Relation, Tree

_LOOSE = 4


@dataclass(frozen=True)
class SensitivityCase:
    """What one kind of example did at worst: the largest distance, infinite where there is a `problem`."""

    name: str
    distance: float
    problem: str | None = None


@dataclass(frozen=True)
class SensitivityReport:
    """What `check_sensitivity` found: for each kind of example its worst case, beside what is promised."""

    sensitivity: Sensitivity
    cases: tuple[SensitivityCase, ...]

    @property
    def promised(self) -> float:
        """The bound with its rounding."""
        return self.sensitivity.total

    @property
    def worst(self) -> SensitivityCase:
        """The case with the largest distance."""
        return max(self.cases, key=lambda case: case.distance)

    @property
    def holds(self) -> bool:
        """Whether no distance exceeds what is promised."""
        return self.worst.distance <= self.promised

    @property
    def failures(self) -> tuple[SensitivityCase, ...]:
        """The cases that exceed what is promised."""
        return tuple(case for case in self.cases if not case.distance <= self.promised)

    def __str__(self) -> str:
        rows = [("one example of ... among ...", "distance", "of promised")]
        rows += [(case.name, case.problem or f"{case.distance:.7g}", self._share(case)) for case in self.cases]
        first, second, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{name:{first}}  {distance:{second}}  {share}" for name, distance, share in rows]
        return "\n".join([f"promised: {self.sensitivity}", *lines, self._verdict()])

    def _share(self, case: SensitivityCase) -> str:
        if case.problem:
            return "BROKEN"
        share = case.distance / self.promised if self.promised else case.distance
        return f"{share:.1%}" if case.distance <= self.promised else f"{share:.8g} times: BROKEN"

    def _verdict(self) -> str:
        worst = self.worst
        if not self.holds:
            return f"BROKEN in {len(self.failures)} of {len(self.cases)} cases, worst for {worst.name}"
        verdict = f"holds in all {len(self.cases)} cases; the largest distance is {worst.distance:.7g}"
        if worst.distance * _LOOSE < self.promised:
            return f"{verdict}, far below the promise: is that of a sum, and the function a mean?"
        return verdict


def check_sensitivity(
    function: Callable[[Tree], object] | ClippedFunction,
    examples: Tree,
    sensitivity: Sensitivity | float,
    *,
    dtypes: Dtype | Iterable[Dtype] | None = None,
    trials: int = 2,
    seed: int = 0,
) -> SensitivityReport:
    """Look for an example that moves `function`'s sum by more than is promised; measure max ||f(D) - f(D')|| exactly.

    D and D' differ in one example, as the sensitivity's relation says. It is NaN, zero, huge, tiny, at the
    threshold, and so on; the others are those given, zeros, random ones, or point where it does, or away from there.

    Args:
        function: from a tree of per-example gradients, batch on axis 0, to a tree of sums. It has to take
            one example less than are given, too, where the relation is adding or removing one. Or what `clipped_grad`
            returns, whose settings are then tried with losses of the test's own: with one whose gradients the examples
            are, and with one that has a kink where its predictions are. Of that the last bits of a prediction decide
            the gradient, and these are the example's own only in programs of one shape.
        examples: such a tree, of arrays of any framework: it says which shapes (batch, ...) and dtypes to try.
            Take as many examples as a batch will have: sums in low precision only fail for many.
        sensitivity: what is promised: a `Sensitivity`, or the largest distance for adding or removing one.
        dtypes: dtypes to try in place of those of the arrays, by name, as "float16", or as a framework has them.
        trials: how often each case is tried, 1 or more, with other random numbers.
        seed: of the random numbers: the same seed gives the same report.

    Returns:
        A `SensitivityReport`: `holds`, `worst`, `cases`; printed, it is a table. A result that is not finite, and
        an arithmetic error that the function raises, count as infinite distances.

    Raises:
        ValueError: fewer than two examples, a sensitivity that is not known, no trials, dtypes that are none of
            gradients or that JAX does not have, results that differ in structure, shape or dtype.
        TypeError: arrays of numbers that are no gradients, a sensitivity that is no number, results that are no sums.

    >>> def mean_of_clipped(grads):
    ...     norms = np.linalg.norm(grads, axis=1, keepdims=True)
    ...     return (grads * np.minimum(1, 1 / np.maximum(norms, 1e-30))).mean(axis=0)
    >>> report = check_sensitivity(mean_of_clipped, np.ones((10, 3)), 1 / 10)
    >>> report.holds, report.worst.name, report.worst.problem
    (False, 'one NaN among the examples given', 'NaN in the result')

    """
    flat = flatten(examples)
    check_batch(flat, flat.leaves, None)
    check_dtypes(flat.leaves, lambda: [f"examples{path}" for path in flat.paths()])
    if len(flat.leaves[0]) < 2:
        raise ValueError("pass two examples or more: one of them is taken away or replaced.")
    trials, seed = check_settings(function, trials, seed)
    sensitivity = as_promise(sensitivity)
    threshold = min(sensitivity.total * (sensitivity.denominator or 1.0), sys.float_info.max)
    if sensitivity.relation == "replace_one":
        threshold /= 2
    clipped = function if isinstance(function, ClippedFunction) else None
    unit = Fraction(1) if clipped is None else step_of(clipped)
    framework = framework_of(flat.leaves[0])
    call = function if clipped is None else framework.compiled(of_gradients(clipped, _zeros_like_one))
    cases = []
    for dtype in as_dtypes(dtypes):
        bench = _Bench.of(flat, dtype, threshold, call, sensitivity.relation, unit)
        for kind in KINDS:
            rng = np.random.default_rng([seed, *kind.encode()])
            found = max(bench.tried(kind, trials, rng), key=lambda case: case.distance)
            cases.append(found)
    if clipped is not None:
        cases += _kinked_cases(clipped, flat.leaves[0], sensitivity.relation, np.random.default_rng(seed))
    return SensitivityReport(sensitivity, tuple(cases))


def _kinked_cases(
    clipped: ClippedFunction, like: Any, relation: Relation, rng: np.random.Generator
) -> Iterator[SensitivityCase]:
    """Yield what a kink in the loss did in batches of several sizes."""
    dtype = bare_name(like.dtype) if bare_name(like.dtype) == "float64" else "float32"
    framework = framework_of(like)
    summed = framework.compiled(kinked(clipped))

    def call(*arrays: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        result, outputs = summed(*(framework.like(like, dtype, x) for x in arrays))
        return numbers_of(result), numbers_of(outputs.aux)[0]

    kinks = Kinks(call, np.dtype(dtype), threshold_of(clipped), relation == "add_or_remove_one")
    for size in sizes(clipped, len(like)):
        squares = [squared_distance(*sums) for sums in kinks.tried(size, rng)]
        name = f"one of {size} examples, the others at a kink of the loss"
        yield SensitivityCase(name, root_up(max(squares) * step_of(clipped) ** 2))


def _zeros_like_one(leaf: Any) -> Any:
    """Return zeros in the shape of one example."""
    return load(differentiating([leaf])).zeros(leaf.shape[1:], leaf)


@dataclass(frozen=True)
class _Bench:
    """One function and the arrays it takes."""

    flat: FlatTree
    dtypes: tuple[str, ...]
    prefix: str
    room: Room
    given: np.ndarray
    function: Callable[[Any], Any]
    relation: Relation
    unit: Fraction

    @classmethod
    def of(
        cls,
        flat: FlatTree,
        dtype: str | None,
        threshold: float,
        function: Callable[[Any], Any],
        relation: Relation,
        unit: Fraction,
    ) -> _Bench:
        """Return the bench for a tree of examples, or for one like it in another dtype."""
        sizes = [math.prod(leaf.shape[1:]) for leaf in flat.leaves]
        dtypes = [bare_name(leaf.dtype) if dtype is None else dtype for leaf in flat.leaves]
        room = Room.of(sizes, list(map(format_named, dtypes)), threshold)
        rows = [numbers_of(leaf)[0].reshape(len(leaf), -1) for leaf in flat.leaves]
        prefix = "" if dtype is None else f"{dtype}: "
        return cls(flat, tuple(dtypes), prefix, room, np.concatenate(rows, axis=1), function, relation, unit)

    def tried(self, kind: str, trials: int, rng: np.random.Generator) -> Iterator[SensitivityCase]:
        """Yield what one kind of example did, among all kinds of others."""
        for _ in range(trials):
            for crowd in ("the examples given", *CROWDS):
                with np.errstate(all="ignore"):
                    example = self.room.within(KINDS[kind](rng, self.room))
                    rows = self._crowd(crowd, example, rng)
                    index = int(rng.integers(len(rows)))
                    rows[index] = example
                    other = self._neighbour(rows, index, rng)
                    yield self._measured(f"{self.prefix}{kind} among {crowd}", rows, other)

    def _crowd(self, crowd: str, example: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if crowd not in CROWDS:
            return self.given.copy()
        return self.room.within(CROWDS[crowd](rng, self.room, len(self.given), example))

    def _neighbour(self, rows: np.ndarray, index: int, rng: np.random.Generator) -> np.ndarray:
        """Return the rows with that at `index` removed, replaced by its opposite or another, or zero."""
        if self.relation == "add_or_remove_one":
            return np.delete(rows, index, axis=0)
        other = rows.copy()
        opposite = -rows[index] if rng.integers(2) else KINDS["ordinary numbers"](rng, self.room)
        other[index] = self.room.within(opposite) if self.relation == "replace_one" else 0.0
        return other

    def _measured(self, name: str, rows: np.ndarray, other: np.ndarray) -> SensitivityCase:
        try:
            results = [self._called(x) for x in (rows, other)]
        except ArithmeticError as error:
            return SensitivityCase(name, math.inf, f"raised {type(error).__name__}")
        check_alike(results[0], results[1], (len(rows), len(other)))
        sums = [[part for leaf in result.leaves for part in numbers_of(leaf)] for result in results]
        wrong = [x[~np.isfinite(x)] for leaves in sums for x in leaves if x.dtype.kind == "f"]
        values = np.concatenate(wrong) if wrong else np.zeros(0)
        if values.size:
            return SensitivityCase(name, math.inf, f"{'NaN' if np.isnan(values).any() else 'infinity'} in the result")
        return SensitivityCase(name, root_up(squared_distance(*sums) * self.unit**2))

    def _called(self, rows: np.ndarray) -> FlatTree:
        ends = np.cumsum([math.prod(leaf.shape[1:]) for leaf in self.flat.leaves])
        pieces = np.split(rows, ends[:-1], axis=1)
        leaves = [
            framework_of(leaf).like(leaf, dtype, piece.reshape(len(rows), *leaf.shape[1:]))
            for leaf, dtype, piece in zip(self.flat.leaves, self.dtypes, pieces, strict=True)
        ]
        result = flatten(self.function(self.flat.rebuild(leaves)))
        check_sums(result)
        return result
