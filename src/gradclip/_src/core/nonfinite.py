"""The policies for gradients that contain NaN or infinity.

| `nonfinite=`  | result                                                                       |
|---------------|------------------------------------------------------------------------------|
| `"propagate"` | every gradient becomes NaN, which makes the problem visible                  |
| `"raise"`     | FloatingPointError that names the leaves; nothing is changed                 |
| `"zero"`      | NaN and infinite elements count as 0, the rest is clipped                    |
| `"drop"`      | the whole result is zeros                                                    |
| `"skip"`      | where a step can be skipped: it is, and then nothing is changed              |

Finite gradients whose squares overflow are finite: no policy applies to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradclip._src.words import listed, shown

if TYPE_CHECKING:
    from gradclip._src.annotations import Policy, StepPolicy
    from gradclip._src.core.protocols import Backend
    from gradclip._src.core.rules import Coefficient
    from gradclip._src.core.values import Array


@dataclass(frozen=True)
class Nonfinite:
    """One row of the table in this module's docstring. No other module knows the policies by name.

    Attributes:
        name: the user's name for it.
        raises: an error is raised, which requires reading the values.
        zeroes: non-finite elements count as 0.
        blanks: the whole result becomes zeros. Where a step can be skipped, it is, and the user's name is "skip".
        tells: how a sum over private examples would reveal that one of them is not finite; empty if it does not.

    """

    name: Policy | StepPolicy
    raises: bool = False
    zeroes: bool = False
    blanks: bool = False
    tells: str = ""

    @property
    def spoils(self) -> bool:
        """Whether non-finite elements make the result NaN."""
        return not (self.raises or self.zeroes or self.blanks)

    @property
    def of_call(self) -> Policy:
        """The name that a call has for it, which cannot skip a step."""
        return DROP.name if self.blanks else self.name  # type: ignore[return-value]

    @classmethod
    def named(cls, nonfinite: object) -> Nonfinite:
        """Return the policy of a call with this name. Raises ValueError if it is not one of the four."""
        if isinstance(nonfinite, str) and nonfinite in _POLICIES:
            return _POLICIES[nonfinite]
        raise _unknown(nonfinite, _POLICIES, _NO_STEP)

    @classmethod
    def of_steps(cls, nonfinite: object) -> Nonfinite:
        """Return the policy with this name, where a step can be skipped. Raises ValueError if it is not one of four."""
        if isinstance(nonfinite, str) and nonfinite in _OF_STEPS:
            return _OF_STEPS[nonfinite]
        raise _unknown(nonfinite, _OF_STEPS, _STEP)

    def check_visible(self, backend: Backend) -> None:
        """Raise a ValueError if the policy needs the values and the call is traced."""
        if self.raises and not backend.visible:
            raise ValueError(
                f"nonfinite='raise' needs the values of the gradients, which a traced call does not have. {OUTSIDE}"
            )

    def settled(self, backend: Backend, finite: Any, coefficient: Coefficient) -> Coefficient:
        """Return the coefficient, adjusted wherever `finite` (of the norm) is False."""
        if backend.concrete and finite.all():
            return coefficient
        if self.blanks:
            return replace(coefficient, keep=coefficient.keep & finite, blank=~finite)
        return coefficient.spoiled(backend.xp, finite)

    def counted(self, xp: ModuleType, norm: Array, mask: Array | None) -> Array | None:
        """Return which norms in the mask count, None for all. The others have the derivative 0."""
        if not self.blanks:
            return mask
        finite = xp.isfinite(norm)
        return finite if mask is None else mask & finite


PROPAGATE = Nonfinite(
    "propagate", tells="under nonfinite='propagate' one NaN makes all of it NaN; pass nonfinite='drop' or 'zero'"
)
RAISE = Nonfinite(
    "raise",
    raises=True,
    tells="under nonfinite='raise' an error reveals that one holds NaN; pass nonfinite='drop' or 'zero'",
)
ZERO = Nonfinite("zero", zeroes=True)
DROP = Nonfinite("drop", blanks=True)
_POLICIES: dict[str, Nonfinite] = {policy.name: policy for policy in (PROPAGATE, RAISE, ZERO, DROP)}
SKIP = replace(DROP, name="skip")
_OF_STEPS: dict[str, Nonfinite] = {policy.name: policy for policy in (PROPAGATE, RAISE, ZERO, SKIP)}
AS_OF_A_CALL = {SKIP.name: DROP.name}
"""The names of policies of steps that calls have under another name."""
_NO_STEP = (
    " 'skip' is for gradclip.clip_at_step, which skips the step. Here 'drop' makes zeros, or leaves an example out."
)
_STEP = " 'drop' makes zeros, with which an optimizer still steps. Here the step can be skipped: pass 'skip'."


def _unknown(nonfinite: object, policies: dict[str, Nonfinite], other: str) -> ValueError:
    why = other if isinstance(nonfinite, str) and nonfinite in _POLICIES | _OF_STEPS else ""
    return ValueError(f"nonfinite must be one of {', '.join(map(repr, policies))}, got {shown(nonfinite)}.{why}")


OUTSIDE = "Call it outside jit, vmap and mx.compile, or pass nonfinite='drop' and check the returned norm."
"""The advice in an error about "raise" in traced code. Integrations that trace replace it."""
TO_GO_ON = "To go on, skip this step, or pass another nonfinite=, such as 'zero'."
"""The advice in an error about NaN or infinity. Integrations without `nonfinite=` replace it."""


def raise_nonfinite(backend: Backend, arrays: Sequence[Any], names: Sequence[str]) -> None:
    """Raise a FloatingPointError that names the arrays with NaN or infinity and counts these elements."""
    found = nonfinite_leaves(backend, arrays, names)
    raise FloatingPointError(explained(f"in {len(found)} of {len(arrays)} leaves", found))


def nonfinite_leaves(backend: Backend, arrays: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return, for each array with NaN or infinity, its name and the counts."""
    found = []
    for x, name in zip(arrays, names, strict=True):
        nans, infinities = backend.count_nonfinite(x)
        if nans or infinities:
            found.append(f"{name}: {nans} NaN, {infinities} infinite of {math.prod(x.shape)} elements")
    return found


def explained(where: str, found: Sequence[str]) -> str:
    """Return the error message for these arrays."""
    return f"the gradients are not finite {where}: {listed(found, '; ')}. Nothing has been changed. {TO_GO_ON}"
