"""A self-test for sums of clipped gradients: can one example move the sum by more than is promised?

Differential privacy rests on max ||f(D) - f(D')|| over all D and D' that differ in one example. No test can find that
maximum. This one searches where careless code usually has it, and measures each distance in exact arithmetic.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gradclip._src.annotations import Dtype, Relation, Tree
from gradclip._src.backends.host.exact import squared_distance
from gradclip._src.backends.on_host import framework_of, numbers_of
from gradclip._src.backends.registry import differentiating, load
from gradclip._src.core.arrays import check_dtypes
from gradclip._src.core.formats import SUPPORTED, bare_name, format_named
from gradclip._src.private.audit.attacks import (
    CROWDS,
    KINDS,
    MOVING,
    Kinks,
    Room,
    combinations,
    kinked,
    of_gradients,
    step_of,
    threshold_of,
)
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.sums.clip import check_batch
from gradclip._src.private.sums.rounding import root_up
from gradclip._src.private.sums.sensitivity import Sensitivity
from gradclip._src.private.sums.settings import as_count, as_number
from gradclip._src.public import public, record
from gradclip._src.tree import FlatTree, flatten
from gradclip._src.words import shown, with_advice

_LOOSE = 4


@record
@dataclass(frozen=True)
class SensitivityCase:
    """The worst case for one kind of example: the largest distance, infinite if there is a `problem`.

    `promised`: whether the sensitivity covers it. It may cover only examples that keep their places.
    """

    name: str
    distance: float
    problem: str | None = None
    promised: bool = True


@public
@dataclass(frozen=True)
class SensitivityReport:
    """The result of `check_sensitivity`: the promised sensitivity, and the worst case for each kind of example.

    It is true if the promise holds, as `holds` is: `assert gradclip.check_sensitivity(...)`.
    """

    sensitivity: Sensitivity
    cases: tuple[SensitivityCase, ...]

    @property
    def promised(self) -> float:
        """The promised distance: the bound plus the rounding."""
        return self.sensitivity.total

    @property
    def worst(self) -> SensitivityCase:
        """The case with the largest distance, among those that the sensitivity covers."""
        return max(self._covered, key=lambda case: case.distance)

    @property
    def holds(self) -> bool:
        """Whether no distance exceeds the promised one."""
        return self.worst.distance <= self.promised

    @property
    def failures(self) -> tuple[SensitivityCase, ...]:
        """The cases whose distance exceeds the promised one, among those that the sensitivity covers."""
        return tuple(case for case in self._covered if not case.distance <= self.promised)

    @property
    def _covered(self) -> list[SensitivityCase]:
        return [case for case in self.cases if case.promised]

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        rows = [("example among other examples", "distance", "of the promise")]
        rows += [(case.name, case.problem or f"{case.distance:.7g}", self._share(case)) for case in self.cases]
        first, second, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{name:{first}}  {distance:{second}}  {share}" for name, distance, share in rows]
        return "\n".join([f"promised: {self.sensitivity}", *lines, self._verdict()])

    def _share(self, case: SensitivityCase) -> str:
        if case.problem:
            return "BROKEN"
        share = case.distance / self.promised if self.promised else case.distance
        if case.distance <= self.promised:
            return f"{share:.1%}"
        return f"{share:.8g} times: {'BROKEN' if case.promised else 'not promised'}"

    def _verdict(self) -> str:
        worst, count = self.worst, len(self._covered)
        if not self.holds:
            return f"BROKEN in {len(self.failures)} of {count} cases, worst for {worst.name}"
        verdict = f"holds in all {count} cases; the largest distance is {worst.distance:.7g}"
        if any(case.distance > self.promised for case in self.cases):
            verdict = f"{verdict}. Only if examples keep their places: where they move, the sum moves further"
        if worst.distance * _LOOSE < self.promised:
            return f"{verdict}, far below the promise. Is the promise for a sum, and the function a mean?"
        return verdict


def as_promise(promised: object) -> Sensitivity:
    """Return the promise. A number is the largest distance when one example is added or removed."""
    if isinstance(promised, Sensitivity):
        return promised
    return Sensitivity(as_number("sensitivity", promised), "example", relation="add_or_remove_one")


def as_dtypes(dtypes: object) -> tuple[str | None, ...]:
    """Return the names of the dtypes to try; None means the dtypes of the arrays.

    Raises ValueError for a dtype that gradients cannot have.
    """
    asked = [*dtypes] if isinstance(dtypes, Iterable) and not isinstance(dtypes, str | type) else [dtypes]
    names = [None if dtype is None else bare_name(str(getattr(dtype, "__name__", dtype))) for dtype in asked]
    for name, dtype in zip(names, asked, strict=True):
        if name is not None and name not in SUPPORTED:
            raise ValueError(f"dtypes must be among {', '.join(SUPPORTED)}, got {shown(dtype)}.")
    return tuple(names) or (None,)


def check_settings(fun: Callable[[Any], Any], trials: object, seed: object) -> tuple[int, int]:
    """Return the number of trials and the seed as ints.

    Raises TypeError if the function is not callable, ValueError for a bad number of trials or a bad seed.
    """
    if not callable(fun):
        raise TypeError(f"fun must be callable with a tree of gradients, got {shown(fun)}.")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise ValueError(f"seed must be a whole number, 0 or more, got {shown(seed)}.")
    return as_count("trials", trials), int(seed)


def check_sums(flat: FlatTree) -> None:
    """Raise an error if a function's result holds no arrays of numbers."""
    if not flat.leaves:
        raise ValueError("fun returned no arrays. Return the sums of clipped gradients.")
    for leaf in flat.leaves:
        name = _dtype(leaf)
        if name not in SUPPORTED and not name.startswith(("int", "uint")):
            raise TypeError(
                f"fun returned {shown(leaf)} of dtype {name}. Return sums in one of {', '.join(SUPPORTED)}, or "
                "integers."
            )


def check_alike(first: FlatTree, second: FlatTree, counts: tuple[int, int]) -> None:
    """Raise a ValueError if two results differ in structure, shape or dtype: they then have no distance."""
    made = [
        {
            path or "an array": f"{_dtype(x)}{list(np.shape(x))}"
            for path, x in zip(flat.paths(), flat.leaves, strict=True)
        }
        for flat in (first, second)
    ]
    if made[0] == made[1] and first.structure == second.structure:
        return
    raise ValueError(
        f"fun returned {_listed(made[0])} for {counts[0]} examples, and {_listed(made[1])} for {counts[1]}. "
        "Return sums over the examples, with the same structure, shapes and dtypes for every batch. From "
        "gradclip.per_example_clip, return the first result only."
    )


def _dtype(x: object) -> str:
    return bare_name(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


def _listed(made: dict[str, str]) -> str:
    return shown(", ".join(f"{path} {what}" for path, what in made.items())).strip("'\"")


@public
@with_advice
def check_sensitivity(
    fun: Callable[[Tree], object] | ClippedFunction,
    examples: Tree,
    *,
    sensitivity: Sensitivity | float,
    dtypes: Dtype | Iterable[Dtype] | None = None,
    trials: int = 2,
    seed: int = 0,
) -> SensitivityReport:
    """Search for an example that moves the sum of `fun` by more than `sensitivity`; measure ||f(D) - f(D')|| exactly.

    D and D' differ in one example, by the relation of the sensitivity. That example is NaN, zero, huge, tiny, at the
    threshold, and so on. The other examples are the given ones, zeros, random, or point in the same or the opposite
    direction.

    Args:
        fun: a function from a tree of per-example gradients, batch on axis 0, to a tree of sums. If the relation
            is "add_or_remove_one", it must also accept a batch with one example fewer, in any order. Or pass what
            `clipped_grad` returned. Its settings are then tested with losses whose gradients are the examples (for
            method="ghost", through products, so that large gradients come in factors), and with losses that have a
            kink at their predictions. There the last bits of a prediction decide the gradient. They can depend on the
            shape of the batch and on the example's place. So examples are masked out, and removed, with the others
            moved up or shuffled. If the sensitivity has `keeps_places`, the report shows what happens to examples that
            move, but `holds` does not count it.
        examples: a tree of arrays of any framework. It sets the shapes (batch, ...) and dtypes to try. Pass as many
            examples as a batch will have: sums in low precision fail only for many.
        sensitivity: the promised `Sensitivity`, or a number: the largest distance when one example is added or removed.
        dtypes: the dtypes to try instead of those of the arrays: names such as "float16", or a framework's dtypes.
        trials: how often each case is tried, 1 or more, each time with new random numbers.
        seed: the seed of the random numbers. The same seed gives the same report.

    Returns:
        A `SensitivityReport` with `holds`, `worst` and `cases`; it prints as a table. A non-finite result counts as an
        infinite distance, and so does an ArithmeticError that the function raises.

    Raises:
        ValueError: fewer than two examples, a sensitivity with unknown rounding or no finite bound, no trials, dtypes
            that gradients cannot have or that JAX lacks, results that differ in structure, shape or dtype.
        TypeError: arrays that cannot be gradients, a sensitivity that is not a number, results that are not sums.

    >>> def mean_of_clipped(grads):
    ...     norms = np.linalg.norm(grads, axis=1, keepdims=True)
    ...     kept = np.minimum(1, 1 / np.maximum(norms, 1e-30))
    ...     return (grads * kept).mean(axis=0)
    >>> examples = np.ones((10, 3))
    >>> report = check_sensitivity(mean_of_clipped, examples, sensitivity=0.1)
    >>> report.holds, report.worst.name, report.worst.problem
    (False, 'one NaN among the examples given', 'NaN in the result')

    """
    flat = flatten(examples)
    check_batch(flat, flat.leaves, None)
    check_dtypes(flat.leaves, lambda: [f"examples{path}" for path in flat.paths()])
    if len(flat.leaves[0]) < 2:
        raise ValueError("pass two examples or more: one is removed or replaced.")
    trials, seed = check_settings(fun, trials, seed)
    sensitivity = as_promise(sensitivity)
    threshold = min(sensitivity.total * (sensitivity.denominator or 1.0), sys.float_info.max)
    if sensitivity.relation == "replace_one":
        threshold /= 2
    clipped = fun if isinstance(fun, ClippedFunction) else None
    if clipped is not None and clipped._settings.to_unit:
        threshold = min(threshold_of(clipped), sys.float_info.max)
    unit = Fraction(1) if clipped is None else step_of(clipped)
    framework = framework_of(flat.leaves[0])
    call = fun if clipped is None else framework.compiled(of_gradients(clipped, _zeros_like_one))
    cases = []
    for dtype in as_dtypes(dtypes):
        bench = _Bench.of(flat, dtype, threshold, call, sensitivity.relation, unit)
        for kind in KINDS:
            rng = np.random.default_rng([seed, *kind.encode()])
            found = max(bench.tried(kind, trials, rng), key=lambda case: case.distance)
            cases.append(found)
    if clipped is not None:
        cases += _kinked_cases(clipped, flat.leaves[0], sensitivity, np.random.default_rng(seed))
    return SensitivityReport(sensitivity, tuple(cases))


def _kinked_cases(
    clipped: ClippedFunction, like: Any, sensitivity: Sensitivity, rng: np.random.Generator
) -> Iterator[SensitivityCase]:
    """Yield the worst cases of losses with a kink, for several batch sizes and changes of the batch."""
    dtype = bare_name(like.dtype) if bare_name(like.dtype) == "float64" else "float32"
    framework = framework_of(like)
    summed = framework.compiled(kinked(clipped))

    def call(w: np.ndarray, x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        result, outputs = summed(*(framework.like(like, dtype, array) for array in (w, x, y)), mask=mask)
        return numbers_of(result), numbers_of(outputs.aux)[0].reshape(y.shape)

    for size, what, outputs in combinations(clipped, len(like), sensitivity.relation):
        kinks = Kinks(call, np.dtype(dtype), threshold_of(clipped), outputs)
        squares = [squared_distance(*sums) for sums in kinks.tried(size, what, rng)]
        several = f" in {outputs[0]} predictions" if outputs else ""
        name = f"one of {size} examples {what}, the others at a kink of the loss{several}"
        distance = root_up(max(squares) * step_of(clipped) ** 2)
        covered = what not in MOVING or not sensitivity.keeps_places
        yield SensitivityCase(name, distance, promised=covered)


def _zeros_like_one(leaf: Any) -> Any:
    """Return zeros with the shape of one example."""
    return load(differentiating([leaf])).zeros(leaf.shape[1:], leaf)


@dataclass(frozen=True)
class _Bench:
    """One function, and the arrays to call it with."""

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
        """Return the bench for a tree of examples, or for the same tree in a different dtype."""
        sizes = [math.prod(leaf.shape[1:]) for leaf in flat.leaves]
        dtypes = [bare_name(leaf.dtype) if dtype is None else dtype for leaf in flat.leaves]
        room = Room.of(sizes, list(map(format_named, dtypes)), threshold)
        rows = [numbers_of(leaf)[0].reshape(len(leaf), -1) for leaf in flat.leaves]
        prefix = "" if dtype is None else f"{dtype}: "
        return cls(flat, tuple(dtypes), prefix, room, np.concatenate(rows, axis=1), function, relation, unit)

    def tried(self, kind: str, trials: int, rng: np.random.Generator) -> Iterator[SensitivityCase]:
        """Yield the cases of one kind of example, among every kind of other examples."""
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
        """Return the rows with the one at `index` replaced (by its opposite or a random one), zeroed, or removed.

        If it is removed, the others move up or are shuffled.
        """
        if self.relation == "add_or_remove_one":
            others = np.delete(rows, index, axis=0)
            return rng.permutation(others) if rng.integers(2) else others
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
