"""What a process sends for many norms is what it sends for each of them alone."""

import math

import numpy as np
import pytest

from gradclip._src.backends.host.backend import HOST
from gradclip._src.core import accumulators
from gradclip._src.core.holders import Held
from gradclip._src.core.layouts import LAYER, Groups, Rows, units_along
from gradclip._src.core.norms import Order
from gradclip._src.distributed.sent import filled, filled_each, flags

ORDERS = [1.0, 2.0, 3.0, math.inf, -math.inf]
LAYERS = [np.array([3.0, 4.0]), np.zeros(2), np.array([1e200, 1e190]), np.array([1e-200]), np.zeros(0)]


@pytest.mark.parametrize("p", ORDERS)
def test_layers_are_sent_as_each_alone(p):
    order, arrays = Order(p), HOST.enter(LAYERS)
    with HOST.precision():
        known, finite = filled_each(HOST, Held(arrays, Groups.each_alone(len(LAYERS))), order)
        alone = []
        for index in range(len(LAYERS)):
            part = HOST.chosen(arrays, [index])
            alone.append(filled(np, HOST.norms(part, order, LAYER), order, part))
    assert finite
    assert len(known) == accumulators.length(order)
    # Their errors may be larger: those proven for all of them together.
    errors = slice(-1, None) if order.extreme else slice(len(known) // 2, None)
    np.testing.assert_allclose(np.array(known)[: errors.start], np.array(alone).T[: errors.start], rtol=1e-14, atol=0)
    assert (np.array(known)[errors] >= 0).all()


@pytest.mark.parametrize("p", [2.0, -math.inf])
def test_rows_are_sent_as_each_alone(p):
    order, x = Order(p), np.array([[3.0, 4.0], [1e-200, 0.0], [1e200, 1e200]])
    with HOST.precision():
        rows, _ = filled_each(HOST, Held(HOST.enter([x]), Rows([units_along((0,))], [x.shape])), order)
        arrays = HOST.enter(list(x))
        each, _ = filled_each(HOST, Held(arrays, Groups.each_alone(3)), order)
    count = accumulators.length(order) // (1 if order.extreme else 2) - order.extreme
    np.testing.assert_allclose(rows[:count], each[:count], rtol=1e-14, atol=0)


def test_rows_without_elements_are_no_smallest_magnitude():
    empty, order = np.zeros((2, 0)), Order(-math.inf)
    with HOST.precision():
        (number, _, _), _ = filled_each(HOST, Held(HOST.enter([empty]), Rows([units_along((0,))], [(2, 0)])), order)
    assert (number == -math.inf).all()  # the identity of the maximum that processes take of negated magnitudes


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_one_norm_that_is_not_finite_is_flagged(wrong):
    arrays = HOST.enter([np.ones(2), np.array([1.0, wrong])])
    with HOST.precision():
        known, finite = filled_each(HOST, Held(arrays, Groups.each_alone(2)), Order(2.0))
        assert flags(HOST, arrays, 1, finite)[0] == math.inf
    last = known[len(known) // 2 - 1]
    assert np.isfinite(last[0])
    assert not np.isfinite(last[1])
