"""What happens when gradients hold NaN or an infinity.

| `nonfinite=`  | result                                                                       |
|---------------|------------------------------------------------------------------------------|
| `"propagate"` | every gradient becomes NaN, so that it is seen                               |
| `"raise"`     | FloatingPointError that names the leaves; nothing has been changed           |
| `"zero"`      | NaN and infinite elements count as 0, the rest is clipped                    |
| `"skip"`      | the whole result is zeros                                                    |

Finite gradients whose squares overflow are finite: no policy applies to them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradclip.backends import Backend
from gradclip.coefficient import Coefficient
from gradclip.tree import listed

POLICIES = ("propagate", "raise", "zero", "skip")


def check_policy(nonfinite: Any) -> str:
    """Return the policy's name. Raises ValueError where it is none of the four."""
    if isinstance(nonfinite, str) and nonfinite in POLICIES:
        return nonfinite
    raise ValueError(f"nonfinite must be one of {', '.join(map(repr, POLICIES))}, got {nonfinite!r}.")


def apply(policy: str, backend: Backend, finite: Any, coefficient: Coefficient) -> Coefficient:
    """Return the coefficient, changed where `finite` (of the norm) is False."""
    if backend.concrete and finite.all():
        return coefficient
    if policy == "skip":
        return replace(coefficient, keep=coefficient.keep & finite, blank=~finite)
    return coefficient.spoiled(backend.xp, finite)


def raise_nonfinite(backend: Backend, arrays: Sequence[Any], names: Sequence[str]) -> None:
    """Raise a FloatingPointError that names the arrays which hold NaN or infinities and counts them."""
    found = nonfinite_leaves(backend, arrays, names)
    raise FloatingPointError(explained(f"in {len(found)} of {len(arrays)} leaves", found))


def nonfinite_leaves(backend: Backend, arrays: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return the name of each array that holds NaN or infinities, and how many."""
    found = []
    for x, name in zip(arrays, names, strict=True):
        nans, infinities = backend.count_nonfinite(x)
        if nans or infinities:
            found.append(f"{name}: {nans} NaN, {infinities} infinite of {math.prod(x.shape)} elements")
    return found


def explained(where: str, found: Sequence[str]) -> str:
    """Return the message of an error about such arrays."""
    return (
        f"the gradients are not finite {where}: {listed(found, '; ')}. "
        "Nothing has been changed. To go on, skip this step, or pass nonfinite='skip' or 'zero'."
    )
