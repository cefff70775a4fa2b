"""What the sums of `gradclip.integrations.jax_privacy` return, and the bound on how far one example moves them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from gradclip._src.passed.arguments import is_single_threshold
from gradclip._src.private.functions.clipped import ClippedFunction
from gradclip._src.private.sums.rounding import root_up, rounded_up
from gradclip.typing import Thresholds

_TIMES_BOUND = {"ADD_OR_REMOVE_ONE": 1, "REPLACE_ONE": 2, "REPLACE_SPECIAL": 1}


class AuxiliaryOutput(NamedTuple):
    """The requested per-example outputs, with the batch on axis 0. Outputs not requested are None.

    Attributes:
        values: the value of the function.
        grad_norms: the norm of the gradient, before `pre_clipping_transform`. For a tree of thresholds, a tree.
        aux: the auxiliary result.
    """

    values: Any = None
    grad_norms: Any = None
    aux: Any = None


@dataclass(frozen=True, eq=False)
class BoundedSensitivityCallable:
    """A function with bounded sensitivity: one example changes its result by at most `l2_norm_bound`.

    With `has_aux`, the bound is on the first of the results. `clipped` is gradclip's own function. Its
    `clipped.sensitivity()` also includes the rounding error of the sum.
    """

    fun: Callable[..., Any]
    l2_norm_bound: Any
    has_aux: bool
    clipped: ClippedFunction

    @property
    def bounded_sensitivity_fun(self) -> Callable[..., Any]:
        """The name of `fun` since jax-privacy 2.3."""
        return self.fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fun(*args, **kwargs)

    def sensitivity(self, neighboring_relation: object = None) -> Any:
        """Return the L2 sensitivity under a `dp_accounting.NeighboringRelation`. None means REPLACE_SPECIAL.

        It holds if all batches have one shape and examples keep their places: pad them, and mark the padding with
        `is_padding_example`.
        """
        name = getattr(neighboring_relation, "name", "REPLACE_SPECIAL" if neighboring_relation is None else "")
        if name not in _TIMES_BOUND:
            raise ValueError(
                f"neighboring_relation must be one of {', '.join(_TIMES_BOUND)}, got {neighboring_relation!r}. "
                "Pass a dp_accounting.NeighboringRelation."
            )
        return _TIMES_BOUND[name] * self.l2_norm_bound


def divided(bound: Any, divisor: float) -> Any:
    """Return a bound divided by a constant, rounded up. A traced bound is rounded to nearest."""
    if isinstance(bound, jax.core.Tracer):
        return bound / divisor
    known = float(bound)
    return known if math.isinf(known) else rounded_up(Fraction(known) / Fraction(divisor))


def bound_of(thresholds: Thresholds, *, to_unit: bool) -> Any:
    """Return the largest norm of a clipped example: the root of the sum of its thresholds' squares, rounded up.

    `to_unit`: each threshold is 1. A traced threshold gives a traced bound.
    """
    if is_single_threshold(thresholds):
        return 1.0 if to_unit else thresholds
    found = jax.tree.leaves(thresholds)
    if to_unit:
        return root_up(Fraction(len(found)))
    if any(isinstance(c, jax.core.Tracer) for c in found):
        return sum(c**2 for c in found) ** 0.5
    each = list(map(float, found))
    return math.inf if math.inf in each else root_up(sum((Fraction(c) ** 2 for c in each), Fraction(0)))
