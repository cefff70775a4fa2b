"""Exact sums of many examples. Each example is rounded to integers, which add up exactly in any order.

A threshold is divided into `grid` steps. An example of D elements is scaled, in units of a step, to a norm of at most
grid - sqrt(D) / 2. Rounding each element to the nearest integer adds at most sqrt(D) / 2 to the norm, so it is at most
`grid`, exactly. The scaled elements are below 2**52, so float64 rounds them correctly. The sum of n examples needs
n * grid < 2**63.

A layer that is clipped to a share s of the threshold has the same steps. By the same argument, its norm is at most
s * grid steps. The squares of the shares add up to at most 1, exactly, so the norm of all layers is at most `grid`.
"""

import math
import numbers
from fractions import Fraction
from typing import NamedTuple

_LARGEST = 2**52


class Grid(NamedTuple):
    """How examples are scaled before rounding: to a norm of at most `steps`, which is `share` of their threshold."""

    steps: float
    share: float


def check_grid(grid: object) -> int:
    """Check a number of steps and return it as an int."""
    steps = int(grid) if isinstance(grid, numbers.Integral) and not isinstance(grid, bool) else 0
    if not 0 < steps <= _LARGEST:
        raise ValueError(f"grid must be the number of steps in max_norm, an integer from 1 to 2**52, got {grid!r}.")
    return steps


def smallest_grid(elements: int, share: float = 1.0) -> int:
    """Return the smallest grid with more than sqrt(elements) / 2 steps in this share of it."""
    return math.isqrt(int(elements / (2 * Fraction(share)) ** 2)) + 1


def grid_for(grid: int, elements: int, examples: int, share: float = 1.0) -> Grid:
    """Return how to scale examples of `elements` elements that are clipped to a share of the threshold.

    Raises ValueError if the grid is too coarse for them, or too fine for the sum to fit int64.
    """
    smallest = smallest_grid(elements, share)
    if grid < smallest:
        where = "" if share == 1 else f" of a layer that is clipped to {share:.3g} of max_norm"
        raise ValueError(
            f"grid={grid} is too coarse for {elements} elements{where}: each may be rounded by half a step. "
            f"The smallest grid that works is {smallest}; {1000 * smallest} costs at most 0.1% of max_norm."
        )
    if grid * examples >= 2**63:
        raise ValueError(
            f"the sum of {examples} examples on a grid of {grid} steps may overflow int64. The largest grid for "
            f"that many is {(2**63 - 1) // examples}."
        )
    root = math.nextafter(math.sqrt(elements), math.inf)
    most = grid if share == 1 else math.nextafter(grid * share, 0.0)
    steps = max(0.0, math.nextafter(most - root / 2, 0.0))
    return Grid(steps, steps / most)


def check_threshold_of_grid(max_norm: object) -> None:
    """Raise a ValueError for a threshold that cannot be divided into steps."""
    if isinstance(max_norm, float) and not 0 < max_norm < math.inf:
        raise ValueError(f"with a grid max_norm must be positive and finite, got {max_norm}. It is divided into steps.")
