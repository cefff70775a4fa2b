"""Updates that someone has chosen so that only exact arithmetic decides about them."""

from fractions import Fraction

import numpy as np

from gradclip._src.backends.host.exact_powers import PowerSum


def near_one(size, power, spread, seed=0):
    """Return float64 numbers whose norm is below 1 by less than 2**-250, at most 2**spread apart but for the last."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(np.abs(rng.normal(size=size)), -rng.integers(0, spread + 1, size=size))
    x *= 0.99 / np.sum(x**power) ** (1 / power)
    total = PowerSum(power)
    total.add([x])
    rest, last = 1 - total.total(), []
    while rest > Fraction(1, 2**250):
        root = float(rest) ** (1 / power)
        while Fraction(root) ** power > rest:
            root = float(np.nextafter(root, 0))
        last.append(root)
        rest -= Fraction(root) ** power
    return np.append(x, last)
