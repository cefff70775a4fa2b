"""The first look at arrays in pieces."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.norms import Order
from gradclip._src.updates.measured import counts, left_out, measured
from held import Held, held
from rational import at_most, power_of_norm, random_leaf

ORDERS = (1.0, 2.0, 3.0, 1.5, 8.0, math.inf, -math.inf)


def look(arrays, order):
    with HOST.precision():
        return measured(arrays, Order(order))


@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_in_pieces_has_the_norm_of_the_whole(order):
    arrays = held(w=np.array([3.0, -4.0, 0.5, 2.0]), b=np.float32([[1.0], [2.5]]), h=np.float16([0.25, -8.0]))
    flat = np.array([3.0, 4.0, 0.5, 2.0, 1.0, 2.5, 0.25, 8.0])
    found = look(arrays, order)
    assert found.value == pytest.approx(np.linalg.norm(flat, order), rel=1e-12)
    assert (found.elements, found.finite, [x.reads for x in arrays]) == (8, True, [1, 1, 1])


@pytest.mark.parametrize("order", [1, 2, 4, math.inf, -math.inf])
def test_the_proven_error_holds_over_all_magnitudes(order):
    rng = np.random.default_rng([7, int(order) if math.isfinite(order) else int(order > 0)])
    for _ in range(60):
        leaves = [random_leaf(rng, kind, int(rng.integers(1, 12))) for kind in rng.choice(["float32", "float64"], 2)]
        found = look([Held(str(i), x, int(rng.integers(1, 5))) for i, x in enumerate(leaves)], float(order)).whole
        divisor = Fraction(1) if found.divisor is None else Fraction(float(found.divisor))
        value, error = Fraction(float(found.value)) * divisor, Fraction(float(found.error))
        upper, lower = value / (1 - error), value * (1 - 2 * error)
        assert at_most(leaves, order, upper)
        exact = power_of_norm(leaves, order)
        assert exact >= (lower if math.isinf(order) else lower**order)


def test_many_pieces_are_added_up():
    found = look([Held("w", np.full(9001, 0.5), 1), Held("b", np.full(12_599, 0.5), 1)], 2.0)
    assert found.value == math.sqrt(21_600) / 2
    assert found.shares == pytest.approx([9001 / 21_600, 12_599 / 21_600])


def test_shares_of_the_norm():
    arrays = held(a=np.array([3.0]), b=np.array([4.0]), c=np.zeros(2), d=np.zeros(0))
    assert look(arrays, 2.0).shares == pytest.approx([0.36, 0.64, 0.0, 0.0])
    assert look(arrays, 1.0).shares == pytest.approx([3 / 7, 4 / 7, 0.0, 0.0])
    assert look(arrays, math.inf).shares == [0.0, 1.0, 0.0, 0.0]
    assert look(arrays, -math.inf).shares == [0.0, 0.0, 1.0, 0.0]
    assert look(held(a=np.array([1e300]), b=np.array([1e-300])), 2.0).shares == [1.0, 0.0]
    assert look(held(a=np.full(4, 1e308), b=np.full(4, 1e308)), 2.0).shares == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_not_finite_is_counted_and_named(order):
    bad = np.array([np.nan, 1.0, np.inf, -np.inf, 2.0, 3.0, np.nan])
    found = look(held(w=bad, b=np.ones(2)), order)
    assert math.isnan(found.value)
    assert found.nonfinite == ["'w' holds 2 NaN and 2 infinite of its 7 numbers"]
    found = look(held(w=np.array([1.0, 2.0, 3.0, np.inf])), order)
    assert found.value == math.inf
    assert not found.finite


def test_nothing_has_norm_zero():
    for order in ORDERS:
        for arrays in ([], held(w=np.zeros(0)), held(w=np.zeros(5))):
            assert look(arrays, order).value == 0.0


def test_an_array_that_cannot_be_read_is_named():
    class Torn(Held):
        def pieces(self):
            yield from super().pieces()
            raise EOFError("the file ends")

    found = look([Torn("w", np.ones(3)), *held(b=np.ones(1))], 2.0)
    assert found.unreadable == ["'w' cannot be read: the file ends"]
    assert math.isnan(found.value)


def test_dtypes_that_count():
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2"):
        assert counts(dtype)
        assert not left_out(dtype)
    for dtype in ("int64", "uint8", "bool", "int4", "float0"):
        assert left_out(dtype)
    for dtype in ("object", "str32", "datetime64[s]", "float128", "void16", "qint8", "bits8", "quint8"):
        assert not counts(dtype)
        assert not left_out(dtype)
