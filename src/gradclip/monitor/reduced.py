"""Long runs in as few points as a picture shows, with the extremes kept."""

from itertools import pairwise

import numpy as np


def bins_of(count: int, most: int) -> list[slice]:
    """Return slices that cut so many entries into at most `most` parts of nearly equal length."""
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int).tolist()
    return [slice(start, end) for start, end in pairwise(edges)]


def envelope(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a line through the smallest and the largest y of each part, in their order; NaN where all are NaN."""
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
    """Return the indices of chosen entries: all if they are few, else the largest of each part."""
    if chosen.sum() <= most:
        return np.flatnonzero(chosen)
    found = []
    for part in bins_of(len(y), most):
        inside = np.flatnonzero(chosen[part])
        if inside.size:
            values = np.where(np.isnan(y[part][inside]), -np.inf, y[part][inside])
            found.append(part.start + int(inside[values.argmax()]))
    return np.array(found, int)


def span_of(steps: np.ndarray) -> tuple[int, int]:
    """Return how many steps there are from the first on, and the least number from one to the next, also the last."""
    gap = max(1, int(np.diff(steps).min())) if len(steps) > 1 else 1
    return int(np.ptp(steps)) + gap, gap


def columns_of(table: np.ndarray, steps: np.ndarray, most: int) -> np.ndarray:
    """Return a table (rows, steps) with at most `most` columns of equal width, at the places of their steps.

    Each is the largest of its part, NaN where all are; a part without a step is as the one before it.
    """
    span, gap = span_of(steps)
    count = min(most, span // gap)
    places = (steps - steps.min()) * count // span
    joined = np.full((count, len(table)), -np.inf)
    np.maximum.at(joined, places, np.where(np.isnan(table), -np.inf, table).T)
    held = np.zeros(count, int)
    held[places] = places
    return np.where(joined == -np.inf, np.nan, joined)[np.maximum.accumulate(held)].T
