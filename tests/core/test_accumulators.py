"""The vectors that holders of parts of a tree add up, against exact arithmetic."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.torch.device import Torch
from gradclip._src.core import accumulators
from gradclip._src.core.norms import Norm, Order

ORDERS = [1, 1.5, 2, 3, 8, math.inf, -math.inf]


def arrays_of(values):
    return HOST.enter([np.asarray(values, np.float64)])


def reduced(vectors, order):
    reduce = np.max if order.extreme else np.sum
    return list(reduce(np.array(vectors, np.float64), axis=0))


def together(parts, ord):
    order = Order.parse(ord)
    vectors = [accumulators.filled(np, HOST.norms(arrays_of(x), order), order, empty=not len(x)) for x in parts]
    with np.errstate(all="raise", under="ignore"):
        return accumulators.norm_of(HOST, reduced(vectors, order), order, len(parts))


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("seed", range(20))
def test_as_the_norm_of_all(ord, seed):
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0, 300)
    parts = [
        rng.standard_normal(rng.integers(0, 20)) * 10.0 ** rng.uniform(-spread, min(spread, 280)) for _ in range(6)
    ]
    whole = HOST.norms(arrays_of(np.concatenate(parts)), Order.parse(ord)).product()
    norm = together(parts, ord)
    np.testing.assert_allclose(norm.product(), whole, rtol=1e-14 if ord in (1, 2, math.inf, -math.inf) else 1e-12)


@pytest.mark.parametrize("ord", [1, 2, 3, 8])
@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-160, 1e-3, 1e3, 1e160, 1e300, 1.7e308])
def test_any_magnitude(ord, scale):
    norm = together([[scale], [], [0.0], [scale, 0.0]], ord)
    ratio = Fraction(float(norm.value)) * Fraction(float(norm.divisor)) / Fraction(scale)
    assert float(ratio) == pytest.approx(2 ** (1 / ord), rel=1e-13)


def test_the_error_is_an_upper_bound():
    rng = np.random.default_rng(0)
    for _ in range(200):
        parts = [np.float32(rng.standard_normal(rng.integers(1, 9)) * 10.0 ** rng.uniform(-30, 30)) for _ in range(5)]
        norm = together(parts, 2)
        square = sum(Fraction(float(x)) ** 2 for part in parts for x in part)
        upper = Fraction(float(norm.value)) / (1 - Fraction(float(norm.error))) * Fraction(float(norm.divisor))
        assert square <= upper**2
        assert norm.error < 1e-13


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize(("bad", "good"), [(math.nan, 1.0), (math.inf, 1.0), (math.nan, 1e300), (math.inf, 1e-300)])
def test_what_is_not_finite_is_seen(ord, bad, good):
    value = float(together([[good], [bad], []], ord).product())
    assert not math.isfinite(value)
    assert math.isnan(value) or (math.isinf(bad) and ord != -math.inf)


@pytest.mark.parametrize("ord", ORDERS)
def test_nobody_holds_anything(ord):
    assert float(together([[], []], ord).product()) == 0.0


@pytest.mark.parametrize("ord", ORDERS)
def test_the_length_does_not_depend_on_what_is_held(ord):
    order = Order.parse(ord)
    lengths = {
        len(accumulators.filled(np, HOST.norms(arrays_of(x), order), order, empty=not len(x)))
        for x in ([], [0.0], [1e-320, 1e300], [math.nan])
    }
    assert lengths == {accumulators.length(order)}


@pytest.mark.parametrize("ord", [1, 2, 3, 8])
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 941.0, 1e160, 1e300])
def test_compiled_as_written(ord, scale):
    order = Order(float(ord))

    def known(value):
        return jnp.stack(accumulators.filled(jnp, Norm(value, None, 2.0**-50, 0.0), order))

    with jax.enable_x64(True):
        value = jnp.float64(scale)
        np.testing.assert_allclose(jax.jit(known)(value), known(value), rtol=1e-12)
        assert np.count_nonzero(known(value)) == 2


def test_orders_that_are_too_high():
    with pytest.raises(ValueError, match="at most 8, inf or -inf, for gradients held in parts"):
        accumulators.check_order(Order(9.0))
    assert accumulators.check_order(Order(8.0)) == Order(8.0)
    assert accumulators.check_order(Order(math.inf)).extreme


@pytest.mark.parametrize("ord", [1, 2, 3, 8])
def test_both_sides_of_every_border_on_a_device(ord):
    """Where values are not looked at, with what lies just below and just above where one place ends."""
    order = Order.parse(ord)
    device = Torch(torch.device("cpu"), visible=True)
    for exponent in range(-1000, 1000, 5):
        parts = [[0.75 * 2.0**exponent], [1.5 * 2.0**exponent]]
        norms = [device.norms(device.enter([torch.tensor(x, dtype=torch.float64)]), order) for x in parts]
        vectors = [torch.stack(accumulators.filled(device.xp, norm, order)) for norm in norms]
        norm = accumulators.norm_of(device, list(torch.stack(vectors).sum(0)), order, 2)
        expected = (0.75**ord + 1.5**ord) ** (1 / ord)
        assert float(norm.value) * (float(norm.divisor) * 2.0**-exponent) == pytest.approx(expected, rel=1e-13)


def test_magnitudes_of_complex_numbers_carry_their_error():
    order = Order.parse(math.inf)
    norm = HOST.norms(HOST.enter([np.array([3 + 4j])]), order)
    assert norm.error > 0
    both = accumulators.norm_of(HOST, reduced([accumulators.filled(np, norm, order)] * 2, order), order, 2)
    assert float(both.value) == 5.0
    assert both.error == norm.error


def test_devices_without_64_bits_are_refused():
    with pytest.raises(ValueError, match="need a device that computes in 64 bits"):
        accumulators.check_wide(Torch(torch.device("mps"), visible=True))
    accumulators.check_wide(Torch(torch.device("cuda"), visible=True))
