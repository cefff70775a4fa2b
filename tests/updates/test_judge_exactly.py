"""Exact norms of arrays in pieces, and by how much they exceed a bound."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.norms import Order
from gradclip._src.updates import judge
from held import Held, excess, held
from rational import power_of_norm, random_leaf


def above(arrays, order, max_norm):
    with HOST.precision():
        return judge.above(arrays, Order(float(order)), Fraction(max_norm))


def close(found, wanted):
    return found == wanted or math.isclose(found, wanted, rel_tol=2.0**-51)


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8, math.inf, -math.inf])
def test_random_trees_beside_long_decimals(order):
    rng = np.random.default_rng([11, int(order) if math.isfinite(order) else int(order > 0)])
    signs = set()
    for turn in range(40):
        leaves = [random_leaf(rng, kind, int(rng.integers(1, 9))) for kind in rng.choice(["float32", "float64"], 2)]
        arrays = [Held(str(i), x, int(rng.integers(1, 5))) for i, x in enumerate(leaves)]
        power = power_of_norm(leaves, order)
        norm = above(arrays, order, 0)[0]
        if not 0 < norm < 1e300:
            continue
        near = [norm, float(np.nextafter(norm, 0)), float(np.nextafter(norm, math.inf)), norm * rng.uniform()]
        bound = near[turn % 4]
        wanted = excess(power, order, Fraction(bound))
        found = above(arrays, order, bound)
        assert close(found[0], norm)
        assert close(found[1], wanted), (leaves, bound, found, wanted)
        signs.add(wanted > 0)
    assert signs == {True, False}


def test_an_excess_far_below_the_last_bit_is_not_lost():
    assert above(held(w=np.array([1.0, 1e-30])), 1, 1) == (1.0, 1e-30)
    assert above(held(w=np.array([1.0, 2.0**-50])), 2, 1) == (1.0, 2.0**-101)
    assert above(held(w=np.array([1.0, 2.0**-50])), 4, 1) == (1.0, 2.0**-202)
    assert above(held(w=np.array([3.0, 4.0])), 2, 5) == (5.0, 0.0)
    assert above(held(w=np.array([0.1])), 2, Fraction(1, 10)) == (0.1, float(Fraction(0.1) - Fraction(1, 10)))


def test_an_excess_is_positive_even_if_no_float_is_so_small():
    assert above(held(w=np.array([1.0, 5e-324])), 2, 1) == (1.0, 5e-324)
    assert above(held(w=np.array([1.0, 1e-200])), 3, 1) == (1.0, 5e-324)


def test_beyond_the_range():
    assert above(held(w=np.full(4, 1e308)), 2, 1e308) == (math.inf, 1e308)
    assert above(held(w=np.full(4, 1.5e308)), 2, 1.0) == (math.inf, math.inf)


def test_complex_numbers():
    z = held(z=np.array([3 + 4j, 1.0]))
    assert above(z, math.inf, 4) == (5.0, 1.0)
    assert above(z, -math.inf, 0.5) == (1.0, 0.5)
    assert above(z, 2, 5)[0] == math.sqrt(26)


@pytest.mark.parametrize("power", range(1, 9))
def test_roots(power):
    for number in (Fraction(0), Fraction(1), Fraction(7, 3) ** power, Fraction(2) ** -9000, Fraction(10) ** 2500):
        found = judge.root(number, power)
        low, high = found * (1 - Fraction(1, 2**119)), found * (1 + Fraction(1, 2**119))
        assert low**power <= number <= high**power


def test_numbers_that_change_between_the_looks_end_in_an_error():
    with pytest.raises(judge.ChangedError, match="w has changed while it was read"):
        above(held(w=np.array([1.0, math.nan])), 2, 1)
