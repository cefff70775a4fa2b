"""Norms of which several holders have parts: all are decided from one measurement, those at the threshold exactly."""

import math

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core.decision import Clipping, Each
from gradclip._src.core.holders import Holders
from gradclip._src.core.layouts import Groups, Rows, units_along
from gradclip._src.core.nonfinite import Nonfinite
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.pipeline import decide, entries_of, part_of
from gradclip._src.core.rules import CLIP, Into


class Others(Holders):
    """Holders that say of the norms what a test tells them, and remember what they were asked."""

    def __init__(self, norms, error=0.0, *, finite=True, at_most=()):
        self.together = self
        self.norms, self.error, self.at_most = np.array(norms), error, np.array(at_most)
        self.all_finite, self.measured, self.asked = finite, 0, None

    def measure(self, backend, arrays, order):
        raise AssertionError("one norm alone")

    def measure_parts(self, backend, parts, order):
        self.measured += 1
        return [Norm(self.norms, None, self.error, 0.0) for _ in parts]

    def finite(self, backend):
        return self.all_finite or self.measured > 1

    def at_most_each(self, backend, part, order, max_norms, unclear):
        self.asked = unclear.tolist()
        return self.at_most

    def raise_nonfinite(self, backend, arrays, names):
        raise FloatingPointError(", ".join(names))


def decided(others, max_norms, nonfinite="propagate"):
    arrays = HOST.enter([np.array([3.0, 0.0]), np.array([1.0])])
    asked = Clipping(Each(max_norms), Order(2.0), Nonfinite.named(nonfinite), CLIP)
    with HOST.precision():
        made = decide(HOST, arrays, asked, lambda: ["a", "b"], layout=Groups.each_alone(2), holders=others)
        made.scaled(HOST, Into(arrays))
    return made, arrays.sources


def test_gradients_are_scaled_by_the_norms_of_all_holders():
    others = Others([6.0, 1.0])
    _, (first, second) = decided(others, [2.0, 2.0])
    assert others.measured == 1
    np.testing.assert_allclose(first, [1.0, 0.0], rtol=1e-14)
    assert second.tolist() == [1.0]


def test_what_the_error_leaves_open_is_asked_exactly():
    others = Others(
        [
            5.0,
            7.0,
        ],
        1e-3,
        at_most=[True, False],
    )
    _, (first, second) = decided(others, [5.0, 7.0])
    assert others.asked == [True, True]
    assert first.tolist() == [3.0, 0.0]
    assert second[0] < 1.0


def test_all_are_asked_even_where_nothing_is_open():
    others = Others([5.0, 7.0], 1e-3, at_most=[True, True])
    _, (first, _) = decided(others, [1.0, 100.0])
    assert others.asked == [False, False]
    np.testing.assert_allclose(first, [0.6, 0.0], rtol=2e-3)


def test_all_measure_again_where_one_sets_elements_to_zero():
    """The norms here are finite, but another holder has found a NaN."""
    others = Others([5.0, 7.0], finite=False)
    decided(others, [10.0, 10.0], "zero")
    assert others.measured == 2


def test_a_nan_of_another_holder_raises_here_too():
    others = Others([5.0, 7.0], finite=False)
    with pytest.raises(FloatingPointError, match="a, b"):
        decided(others, [10.0, 10.0], "raise")


def test_layers_that_are_not_finite_become_zeros():
    _, (first, second) = decided(Others([math.nan, 1.0], finite=False), [10.0, 10.0], "drop")
    assert first.tolist() == [0.0, 0.0]
    assert second.tolist() == [1.0]


def test_the_norms_of_a_part_have_its_shape():
    layout = Rows([units_along((0,)), units_along(())], [(3, 2), (4,)])
    norm = Norm(np.arange(4.0), None, np.arange(4.0) / 8, 0.0)
    first, second = (part_of(layout, norm, number) for number in (0, 1))
    assert first.value.tolist() == [0.0, 1.0, 2.0]
    assert second.value.shape == ()
    assert float(second.error) == 0.375
    assert first.divisor is None
    assert first.floor == 0.0
    assert entries_of(Groups.each_alone(2), np.array([1.0, 2.0]), 1) == 2.0
