"""Exact norms, in rational arithmetic, and the random trees they are tried on."""

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np

from frameworks import numpy_dtype

RANGES = {
    "float16": (-7.0, 4.7),
    "bfloat16": (-45.0, 38.0),
    "float32": (-45.0, 38.0),
    "float64": (-307.0, 307.0),
    "complex64": (-45.0, 38.0),
    "complex128": (-307.0, 307.0),
}


def components(leaves):
    """Return all real numbers of the leaves, real and imaginary parts of complex ones, as fractions."""
    return [abs(Fraction(v)) for v in _numbers(leaves)]


def power_of_norm(leaves, ord):
    """Return the norm of integer order to the power `ord`, or the extreme magnitude, exactly."""
    if math.isinf(ord):
        magnitudes = list(map(abs, _numbers(leaves)))
        if not all(map(math.isfinite, magnitudes)):
            raise ValueError("what is not finite has no exact norm")
        return Fraction((max if ord > 0 else min)(magnitudes))
    sums = defaultdict(int)  # of numerators, by denominator: fractions take ten times as long
    for v in _numbers(leaves):
        numerator, denominator = v.as_integer_ratio()
        sums[denominator] += abs(numerator) ** ord
    return sum(Fraction(total, denominator**ord) for denominator, total in sums.items())


def _numbers(leaves):
    """Return all real numbers of the leaves as floats."""
    found = []
    for leaf in leaves:
        flat = np.asarray(leaf).ravel()
        parts = [flat.real, flat.imag] if np.iscomplexobj(flat) else [flat]
        found += [v for part in parts for v in part.astype(np.float64).tolist()]
    return found


def at_most(leaves, ord, threshold):
    limit = Fraction(threshold)
    return power_of_norm(leaves, ord) <= (limit if math.isinf(ord) else limit**ord)


def random_leaf(rng, dtype, size):
    """Return an array of one of four kinds: ordinary, at one magnitude, at all magnitudes, of small integers."""
    low, high = RANGES[dtype]
    kind = rng.integers(4)
    if kind == 0:
        values = rng.normal(size=size)
    elif kind == 1:
        values = rng.normal(size=size) * 10.0 ** rng.uniform(low, high - 0.8)
    elif kind == 2:
        values = rng.choice([-1.0, 1.0], size=size) * 10.0 ** rng.uniform(low, high - 0.2, size=size)
    else:
        values = rng.integers(-5, 6, size=size) * 10.0 ** rng.integers(max(low, -20), min(high, 20))
    if "complex" in dtype:
        values = values + 1j * rng.permutation(values)
    return values.astype(numpy_dtype(dtype))


def random_threshold(rng, leaves, ord):
    """Return a threshold at, near or far from the norm."""
    magnitudes = [float(m) for m in components(leaves)]
    top = max(magnitudes) or 1.0
    norm = top if math.isinf(ord) else top * math.fsum((m / top) ** ord for m in magnitudes) ** (1 / ord)
    norm = min(norm, 1e308)
    kind = rng.integers(5)
    if kind < 3:
        return [norm, float(np.nextafter(norm, 0)), norm * rng.uniform()][kind]
    return min(norm * 10.0 ** rng.uniform(-9, 2), 1e308) if kind == 3 else 10.0 ** rng.uniform(-30, 30)
