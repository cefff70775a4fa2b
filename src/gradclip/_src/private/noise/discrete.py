"""Discrete Gaussian noise on integers, drawn exactly from the operating system's random numbers, by many threads.

The noise of scale s is z with probability proportional to exp(-z**2 / (2 s**2)), for every integer z: Canonne, Kamath
and Steinke 2020, "The Discrete Gaussian for Differential Privacy". A sum beyond int64 becomes the nearest int64, which
is a function of the released sum.

"system" draws many numbers at once, with the proof in `private/noise/rejection.py`. "opendp" is OpenDP's sampler, which
computes with integers and fractions alone, one number at a time. Both let other threads run while they draw, and
neither repeats itself in a forked process: the system's random numbers have no state here, and OpenDP's notice a fork.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import numpy as np

from gradclip._src.private.noise.draws import SystemDraws
from gradclip._src.private.noise.extra import needed_for
from gradclip._src.private.noise.rejection import with_noise

EXACT = ("system", "opendp")

Sampler = Callable[[np.ndarray], np.ndarray]
Measurement = Callable[[list[int]], list[int]]

_AT_ONCE = {"system": 1 << 16, "opendp": 1 << 10}  # elements: more than 10 milliseconds
_enabling = Lock()


def with_discrete_gaussian(
    values: np.ndarray, scale: float, source: str = "system", threads: int | None = None
) -> np.ndarray:
    """Return int64 integers (1-D) plus independent noise. `threads`: None for as many as processors may be used."""
    size = _AT_ONCE[source]
    pieces = [values[start : start + size] for start in range(0, values.size, size)]
    workers = min(len(pieces), processors() if threads is None else threads)

    def noised(own: list[np.ndarray]) -> list[np.ndarray]:
        plus_noise = sampler(source, scale)  # one for each thread
        return list(map(plus_noise, own))

    if workers <= 1:
        found = [noised(pieces)] if pieces else []
    else:
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(noised, (pieces[first::workers] for first in range(workers))))
    every = np.empty(values.size, np.int64)
    for first, arrays in enumerate(found):
        for turn, array in enumerate(arrays):
            start = (first + turn * len(found)) * size
            every[start : start + array.size] = array
    return every


def sampler(source: str, scale: float) -> Sampler:
    """Return what adds the noise to an array of int64 integers."""
    if source == "system":
        return partial(with_noise, scale=scale, draws=SystemDraws())
    measurement = gaussian(scale)
    return lambda piece: np.array(measurement(piece.tolist()), np.int64)


def gaussian(scale: float) -> Measurement:
    """Return OpenDP's measurement, which adds the noise to a list of int64 integers."""
    with needed_for("noise by rng='opendp'"):
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
