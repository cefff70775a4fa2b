"""Long runs reduced to the number of points in a picture. The extremes are kept."""

from itertools import pairwise

import numpy as np


def bins_of(count: int, most: int) -> list[slice]:
    """Return slices that cut `count` entries into at most `most` parts of nearly equal length."""
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int).tolist()
    return [slice(start, end) for start, end in pairwise(edges)]


def envelope(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a line through the smallest and largest y of each part, in order; NaN if all of a part are NaN."""
    if len(x) <= 2 * most:
        return x, y
    places: list[int] = []
    for part in bins_of(len(x), most):
        values = y[part]
        if np.isnan(values).all():
            places.append(part.start)
        else:
            places += sorted({part.start + int(np.nanargmin(values)), part.start + int(np.nanargmax(values))})
    return x[places], y[places]


def largest(y: np.ndarray, chosen: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of chosen entries: all of them if few, else the largest in each part."""
    if chosen.sum() <= most:
        return np.flatnonzero(chosen)
    found = []
    for part in bins_of(len(y), most):
        inside = np.flatnonzero(chosen[part])
        if inside.size:
            values = np.where(np.isnan(y[part][inside]), -np.inf, y[part][inside])
            found.append(part.start + int(inside[values.argmax()]))
    return np.array(found, int)


def span_of(steps: np.ndarray, sampled: np.ndarray | None = None) -> tuple[int, int]:
    """Return how many steps the run covers, and the smallest gap between two of those sampled, by default all.

    The last step adds one gap.
    """
    usual = steps if sampled is None else steps[sampled]
    gap = max(1, int(np.diff(usual).min())) if len(usual) > 1 else 1
    return int(np.ptp(steps)) + gap, gap


def columns_of(table: np.ndarray, steps: np.ndarray, most: int, sampled: np.ndarray | None = None) -> np.ndarray:
    """Reduce a table (rows, steps) to at most `most` columns of equal width, placed by step number.

    Each column holds the largest value of its part, or NaN if all are NaN. A part without steps repeats the one before.
    A step that is not `sampled` counts for its own part only, and makes the columns no narrower.
    """
    usual = np.ones(len(steps), bool) if sampled is None else sampled
    span, gap = span_of(steps, usual)
    count = max(1, min(most, span // gap))
    places = (steps - steps.min()) * count // span
    held = np.zeros(count, int)
    held[places[usual]] = places[usual]
    repeated = _largest_of(table.T[usual], places[usual], count)[np.maximum.accumulate(held)]
    joined = np.maximum(repeated, _largest_of(table.T[~usual], places[~usual], count))
    return np.where(joined == -np.inf, np.nan, joined).T


def _largest_of(rows: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Return the largest rows at each place; minus infinity without any."""
    joined = np.full((count, rows.shape[1]), -np.inf)
    np.maximum.at(joined, places, np.where(np.isnan(rows), -np.inf, rows))
    return joined
