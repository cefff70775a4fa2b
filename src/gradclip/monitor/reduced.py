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


def columns_of(table: np.ndarray, most: int) -> np.ndarray:
    """Return a table (rows, steps) with at most `most` columns, each the largest of its part; NaN where all are."""
    if table.shape[1] <= most:
        return table
    parts = [table[:, part] for part in bins_of(table.shape[1], most)]
    filled = [np.where(np.isnan(part), -np.inf, part).max(axis=1) for part in parts]
    joined = np.stack(filled, axis=1)
    return np.where(joined == -np.inf, np.nan, joined)
