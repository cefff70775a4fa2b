"""The report of `check_sensitivity`: the distances that it measured, beside the promise."""

from __future__ import annotations

from dataclasses import dataclass

from gradclip._src.private.sums.sensitivity import Sensitivity

_LOOSE = 4


@dataclass(frozen=True)
class SensitivityCase:
    """The worst case for one kind of example: the largest distance, infinite if there is a `problem`.

    `promised`: whether the sensitivity covers it. It may cover only examples that keep their places.
    """

    name: str
    distance: float
    problem: str | None = None
    promised: bool = True


@dataclass(frozen=True)
class SensitivityReport:
    """The result of `check_sensitivity`: the promised sensitivity, and the worst case for each kind of example."""

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
