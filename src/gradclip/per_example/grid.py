"""Exact sums of many examples: each is rounded to a grid of integers, and integers add up exactly in any order.

A threshold is divided into `grid` steps. An example of D elements, in units of a step, is scaled to a norm of at most
grid - sqrt(D) / 2; rounding each element to the nearest integer then adds at most sqrt(D) / 2 to it, so that it ends
at most at `grid`, exactly. As the scaled elements are at most `grid` < 2**52, float64 rounds them rightly, and the sum
of n examples needs n * grid < 2**63.

A layer that is clipped to a share s of the threshold has the same steps: its norm is at most s * grid of them, with the
same argument. As the squares of the shares add up to at most 1, exactly, all layers together end at most at `grid`.
"""

import math
import numbers
from fractions import Fraction
from typing import NamedTuple

_LARGEST = 2**52


class Grid(NamedTuple):
    """How examples are scaled before they are rounded: to at most `steps`, which is `share` of their threshold."""

    steps: float
    share: float


def check_grid(grid: object) -> int:
    """Return the number of steps in a threshold."""
    steps = int(grid) if isinstance(grid, numbers.Integral) and not isinstance(grid, bool) else 0
    if not 0 < steps <= _LARGEST:
        raise ValueError(f"grid must be the number of steps in max_norm, an integer from 1 to 2**52, got {grid!r}.")
    return steps


def smallest_grid(elements: int, share: float = 1.0) -> int:
    """Return the smallest grid of which a share has more than sqrt(elements) / 2 steps."""
    return math.isqrt(int(elements / (2 * Fraction(share)) ** 2)) + 1


def grid_for(grid: int, elements: int, examples: int, share: float = 1.0) -> Grid:
    """Return how examples of so many elements are scaled that are clipped to a share of the threshold.

    Raises ValueError for a grid that cannot hold them.
    """
    smallest = smallest_grid(elements, share)
    if grid < smallest:
        where = "" if share == 1 else f" of a layer that is clipped to {share:.3g} of max_norm"
        raise ValueError(
            f"grid={grid} is too coarse for {elements} elements{where}, of which each may be rounded by half a step: "
            f"the smallest grid that works is {smallest}, and one of {1000 * smallest} costs 0.1% of max_norm at most."
        )
    if grid * examples >= 2**63:
        raise ValueError(
            f"the sum of {examples} examples on a grid of {grid} steps may leave int64's range; the largest grid for "
            f"it is {(2**63 - 1) // examples}."
        )
    root = math.nextafter(math.sqrt(elements), math.inf)
    most = grid if share == 1 else math.nextafter(grid * share, 0.0)
    steps = max(0.0, math.nextafter(most - root / 2, 0.0))
    return Grid(steps, steps / most)


def check_threshold_of_grid(max_norm: object) -> None:
    """Raise a ValueError for a threshold that has no steps."""
    if isinstance(max_norm, float) and not 0 < max_norm < math.inf:
        raise ValueError(f"with a grid max_norm must be positive and finite, got {max_norm}: it is divided into steps.")
