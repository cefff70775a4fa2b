"""The kernels for GPUs in Triton's interpreter: norms, decisions and products, in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from gradclip._src.backends.torch.framework import HOST
from gradclip._src.backends.torch.launches import NEAREST, NEAREST_BUT_FLOAT16, described, table_of
from gradclip._src.core.norms import Order
from interpreted import SILENT, interpreted
from rational import at_most, power_of_norm

pytestmark = pytest.mark.filterwarnings(SILENT)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 15, 16, 17, 1023, 4097, 65536, 65537, 131073)
ORDERS = (1, 2, math.inf)


@pytest.fixture
def launched():
    with interpreted() as found:
        yield found


def drawn(seed, dtype, sizes, spread=0.0):
    """Return normal numbers, over so many powers of ten."""
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(size=n) * 10.0 ** rng.uniform(-spread, spread, n)).to(dtype) for n in sizes]


def values(leaves):
    return [x.double().numpy() for x in leaves]


def measured(leaves, order, **options):
    found = described(leaves)
    table = table_of(found)
    table.measure(found.addresses, Order(order))
    return table, found, table.decide(options.pop("max_norm", 1.0), Order(order), dtype=torch.float64, **options)[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_right_to_its_proven_error(launched, dtype, order):
    leaves = drawn(0, dtype, SIZES, spread=3.0)
    norm = Fraction(float(measured(leaves, order)[2]))
    exact = power_of_norm(values(leaves), order)
    found = norm if math.isinf(order) else norm**order
    error = Fraction(0 if math.isinf(order) else 2 * launched.module.additions(8) * 2.0**-53)
    assert abs(found - exact) <= error * exact


def test_dtypes_share_a_launch(launched):
    leaves = [x for dtype in DTYPES for x in drawn(1, dtype, (5, 70_000))]
    norm = measured(leaves, 2)[2]
    assert launched.names == ["sums", "decide"]
    assert float(norm) ** 2 == pytest.approx(float(power_of_norm(values(leaves), 2)), rel=1e-13)


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_address_and_length(launched, dtype, shift):
    (flat,) = drawn(2, dtype, (5000,))
    for size in (0, 1, 7, 8, 9, 1024, 1031, 4000):
        view = flat[shift : shift + size]
        norm = measured([view], 1)[2] if size else torch.zeros(())
        assert Fraction(float(norm)) == pytest.approx(power_of_norm(values([view]), 1), rel=1e-13)
        before = flat.clone()
        found = described([view])
        table = table_of(found)
        table.scale(found.addresses, factors=torch.tensor([[0.5, 1.0]]), whole=True)
        assert torch.equal(view, (before[shift : shift + size].float() * 0.5).to(dtype))
        assert torch.equal(flat[:shift], before[:shift])
        assert torch.equal(flat[shift + size :], before[shift + size :])
        flat.copy_(before)


SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, -(2.0**-126), 2.0**-24, 65504.0, 1e-8, 3e38, -1.0, 0.1, 1 / 3)
FACTORS = (
    *((f, 1.0) for f in (0.5, 1 / 3, 0.999, 1e-3, 2.0**-126, 0.0, 1 - 2.0**-24)),
    *((f, 2.0**-126) for f in (1.0, 0.75, 1e-5, 2.0**-126)),
)


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_host_bit_for_bit(launched, dtype, factors):
    leaves = [torch.tensor(SPECIAL).to(dtype), *drawn(3, dtype, (2000,), spread=30.0)]
    leaves[1][leaves[1].isinf()] = 1.0
    first, second = (float(np.float32(factor)) for factor in factors)
    found = described(leaves)
    on_host = [x.clone() for x in leaves]
    kernels = HOST.known(on_host)
    kernels.scale(kernels, (0.0, 0.0), (first, second), 1)
    table_of(found).scale(found.addresses, factors=torch.tensor([[first, second]]), whole=True)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    for x, y in zip(leaves, on_host, strict=True):
        assert torch.equal(x.view(bits), y.view(bits))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_norm", [0.0, 1e-45, 1e-39, 1e-7, 0.3, 40.0, 1e30, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_holds_for_any_threshold(launched, dtype, order, max_norm):
    leaves = [torch.tensor(SPECIAL[:-5]).to(dtype), *drawn(4, dtype, (300, 17))]
    leaves[0][leaves[0].isinf()] = 1.0
    before = [x.clone() for x in leaves]
    table, found, norm = measured(leaves, order, max_norm=max_norm)
    table.scale(found.addresses)
    if max_norm == math.inf or float(norm) * (1 + 1e-12) < max_norm:
        assert all(map(torch.equal, leaves, before))
    else:
        assert at_most(values(leaves), order, max_norm)
        least = {torch.float32: 1 - 1e-5}.get(dtype, 0.99)
        if max_norm >= 0.3:
            assert not at_most(values(leaves), order, max_norm * least)


@pytest.mark.parametrize("ratio", [1.0, 1 - 2.0**-53, 1 - 2.0**-40, 1 + 2.0**-30])
def test_a_norm_within_its_error_of_the_threshold_is_clipped_or_below_it(launched, ratio):
    leaves = drawn(5, torch.float32, (1000, 70_000))
    norm = float(measured(leaves, 2)[2])
    table, found, _ = measured(leaves, 2, max_norm=norm * ratio)
    table.scale(found.addresses)
    assert at_most(values(leaves), 2, norm * ratio)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_first_factor_that_is_rounded_to_one_is_no_reason_to_keep(launched, dtype):
    leaves = [torch.ones(1, dtype=dtype)]
    max_norm = 2.0**-126 * (1 + 2.0**-23 - 2.0**-27)
    table, found, _ = measured(leaves, 2, max_norm=max_norm)
    table.scale(found.addresses)
    assert at_most(values(leaves), 2, max_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", [NEAREST, NEAREST_BUT_FLOAT16])
def test_products_can_be_rounded_to_nearest(launched, dtype, rounding):
    leaves = [torch.tensor([*SPECIAL, math.nan]).to(dtype), *drawn(12, dtype, (3000,), spread=5.0)]
    factor = float(np.float32(1 / 3))
    wanted = [(x.float() * factor).to(dtype) for x in leaves]
    found = described(leaves)
    table_of(found).scale(found.addresses, factors=torch.tensor([[factor, 1.0]]), rounding=rounding, whole=True)
    for x, y in zip(leaves, wanted, strict=True):
        if dtype is torch.float16 and rounding == NEAREST_BUT_FLOAT16:
            assert (x.abs() <= y.abs()).logical_or(x.isnan()).all()
            assert not torch.equal(x, y)
        else:
            assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_spoils_or_blanks_all(launched, dtype, order, value):
    leaves = drawn(6, dtype, (40, 5000))
    leaves[1][4999] = value
    for skip, wanted in ((False, torch.isnan), (True, lambda x: x == 0)):
        now = [x.clone() for x in leaves]
        table, found, norm = measured(now, order, max_norm=math.inf, skip=skip)
        table.scale(found.addresses)
        assert not math.isfinite(float(norm))
        assert math.isnan(float(norm)) == math.isnan(value)
        assert all(wanted(x).all() for x in now)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_can_count_as_zero(launched, dtype, order):
    leaves = drawn(7, dtype, (40, 70_000 if order == 2 else 5000, 3))
    leaves[0][3], leaves[1][5], leaves[1][-1] = math.nan, math.inf, -math.inf
    wanted = [x.nan_to_num(0.0, 0.0, 0.0) for x in leaves]
    exact = float(power_of_norm(values(wanted), order)) ** (1 if math.isinf(order) else 1 / order)
    found = described(leaves)
    table = table_of(found)
    table.measure(found.addresses, Order(order), zero=True)
    for max_norm in (1e6, 0.5):
        norm = table.decide(max_norm, Order(order), dtype=torch.float64)[0]
        table.scale(found.addresses, zero=True)
        assert float(norm) == pytest.approx(exact, rel=1e-13)
        assert at_most(values(leaves), order, max_norm)
        assert max_norm < 1e6 or all(map(torch.equal, leaves, wanted))


def test_nothing_is_written_where_nothing_is_clipped(launched):
    leaves = drawn(8, torch.float32, (1000, 70_000))
    size = sum(x.numel() for x in leaves) * 4
    table, found, _ = measured(leaves, 2, max_norm=1e9)
    table.scale(found.addresses)
    assert (launched.names, launched.read, launched.written) == (["sums", "decide", "scale"], size, 0)
    table.decide(1.0, Order(2.0))
    table.scale(found.addresses)
    assert (launched.read, launched.written) == (2 * size, size)


def test_parts_are_decided_each_by_its_own_norm(launched):
    leaves = drawn(9, torch.float32, (40, 70_000, 17, 5))
    found = described(leaves)
    table = table_of(found, (1, 0, 1, 2), 3)
    table.measure(found.addresses, Order(2.0))
    norms = table.decide([1.0, 1e9, 0.25], Order(2.0))
    before = [x.clone() for x in leaves]
    table.scale(found.addresses)
    groups = [[before[1]], [before[0], before[2]], [before[3]]]
    exact = [math.sqrt(power_of_norm(values(group), 2)) for group in groups]
    assert norms.tolist() == pytest.approx(exact, rel=1e-6)
    assert torch.equal(leaves[0], before[0])
    assert torch.equal(leaves[2], before[2])
    assert at_most(values(leaves[1:2]), 2, 1.0)
    assert at_most(values(leaves[3:]), 2, 0.25)
    assert not at_most(values(leaves[3:]), 2, 0.2499)


@pytest.mark.parametrize("joint", [False, True])
def test_a_part_that_is_not_finite_counts_for_all_if_they_are_joint(launched, joint):
    leaves = drawn(10, torch.bfloat16, (40, 50))
    leaves[0][3] = math.nan
    found = described(leaves)
    table = table_of(found, (0, 1), 2)
    table.measure(found.addresses, Order(2.0))
    norms = table.decide([1e9, 1e9], Order(2.0), joint=joint)
    table.scale(found.addresses)
    assert [math.isnan(norm) for norm in norms.tolist()] == ([True, False, True] if joint else [True, False])
    assert leaves[0].isnan().all()
    assert leaves[1].isnan().all() == joint


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.5, math.inf, math.nan])
def test_a_threshold_on_the_device(launched, threshold):
    leaves = drawn(11, torch.float32, (1000,))
    before = leaves[0].clone()
    table, found, _ = measured(leaves, 2, max_norm=torch.tensor(threshold, dtype=torch.float64))
    table.scale(found.addresses)
    if math.isnan(threshold):
        assert leaves[0].isnan().all()
    elif threshold == math.inf:
        assert torch.equal(leaves[0], before)
    else:
        assert at_most(values(leaves), 2, max(0.0, threshold))
        assert threshold <= 0 or not at_most(values(leaves), 2, threshold * (1 - 1e-6))
