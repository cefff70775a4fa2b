"""Discrete Gaussian noise on integers by OpenDP: an exact sampler, from the operating system's random numbers.

The noise of scale s is z with probability proportional to exp(-z**2 / (2 s**2)), for every integer z: Canonne, Kamath
and Steinke 2020, "The Discrete Gaussian for Differential Privacy". OpenDP computes with integers and fractions alone.
A sum beyond int64 becomes the nearest int64, which is a function of the released sum.

OpenDP lets other threads run while it draws, so the elements are shared among threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np

from gradclip.private.extra import needed_for

Measurement = Callable[[list[int]], list[int]]

_AT_ONCE = 1 << 12  # elements: a twentieth of a second
_enabling = Lock()


def with_discrete_gaussian(values: np.ndarray, scale: float, threads: int | None = None) -> np.ndarray:
    """Return int64 integers (1-D) plus independent noise. `threads`: None for as many as processors may be used."""
    pieces = [values[start : start + _AT_ONCE].tolist() for start in range(0, values.size, _AT_ONCE)]
    workers = min(len(pieces), processors() if threads is None else threads)

    def noised(own: list[list[int]]) -> list[np.ndarray]:
        measurement = gaussian(scale)  # one for each thread
        return [np.array(measurement(piece), np.int64) for piece in own]

    if workers <= 1:
        found = [noised(pieces)] if pieces else []
    else:
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(noised, (pieces[first::workers] for first in range(workers))))
    every = np.empty(values.size, np.int64)
    for first, arrays in enumerate(found):
        for turn, array in enumerate(arrays):
            start = (first + turn * len(found)) * _AT_ONCE
            every[start : start + array.size] = array
    return every


def gaussian(scale: float) -> Measurement:
    """Return OpenDP's measurement, which adds the noise to a list of int64 integers."""
    with needed_for("noise by rng='system'"):
        # Not `opendp.prelude`, which imports scikit-learn and Polars if they are installed.
        from opendp.domains import atom_domain, vector_domain
        from opendp.measurements import make_gaussian
        from opendp.metrics import l2_distance
        from opendp.mod import GLOBAL_FEATURES, disable_features, enable_features
    with _enabling:
        off = "contrib" not in GLOBAL_FEATURES
        enable_features("contrib")
        try:
            return make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=scale)
        finally:
            if off:
                disable_features("contrib")


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
