"""The bound, norms and bits at the edges: odd sizes, thresholds and magnitudes at both ends of a dtype's range."""

import math
from fractions import Fraction

import pytest
import torch

import gradclip
from on_gpu import DEVICE, DTYPES, ON, TIGHT, drawn, grads, held, moved, on_host, same_bits
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
SIZES = (0, 1, 15, 16, 17, 65535, 65536, 65537, 131073)
WIDE, HALF = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
SMALL = [(17, 5), (), (0, 3), (33,)]


def clipped(leaves, max_norm, ord=2, **settings):
    """Return the gradients after the call, in place and functional, and the norm, without waiting within them."""
    holders = held(leaves)
    with ON.waiting_is_an_error():
        norm = gradclip.clip_grad_norm_(holders, max_norm, ord, **settings)
        new, same = gradclip.clip_by_global_norm(leaves, max_norm, ord=ord, **settings)
    torch.testing.assert_close(norm, same, rtol=1e-6, atol=0, equal_nan=True)
    return grads(holders), new, norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_vector_of_ones(dtype, size):
    """Its norm is the root of its size, and each sum of squares is exact."""
    ones = torch.ones(size, dtype=dtype, device=DEVICE)
    written, new, norm = clipped([ones], 0.25)
    assert float(norm) == pytest.approx(math.sqrt(size), rel=1e-6)
    for x in (written[0], new[0]):
        element = float(x[0]) if size else 0.0
        assert torch.equal(x, torch.full_like(ones, element))  # no chunk is left out or scaled twice
        assert size * Fraction(element) ** 2 <= Fraction(1, 16)
        assert size == 0 or size * element**2 >= (0.25 * (1 - TIGHT[dtype])) ** 2
    (kept,), _, _ = clipped([ones], 400.0)
    assert torch.equal(kept, ones)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_sizes_in_one_call(dtype):
    sizes = [*SIZES, *SIZES[::-1]]
    leaves = [torch.full((size,), 2.0 ** -(i % 7), dtype=dtype, device=DEVICE) for i, size in enumerate(sizes)]
    squares = [size * Fraction(1, 4 ** (i % 7)) for i, size in enumerate(sizes)]
    written, new, norm = clipped(leaves, 3.0)
    assert float(norm) == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)
    for results in (written, new):
        firsts = [float(x[0]) if len(x) else 0.0 for x in results]
        assert all(torch.equal(x, torch.full_like(x, first)) for x, first in zip(results, firsts, strict=True))
        total = sum(size * Fraction(first) ** 2 for size, first in zip(sizes, firsts, strict=True))
        assert (3 * (1 - TIGHT[dtype])) ** 2 <= total <= 9


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 1e-45, math.inf])
def test_thresholds_at_the_ends(dtypes, ord, max_norm):
    leaves, there = drawn(4, dtypes, SMALL)
    written, new, _ = clipped(there, max_norm, ord)
    for results in (written, new):
        if max_norm == math.inf:
            assert same_bits(results, leaves)
        else:
            assert at_most(on_host(results), ord, max_norm)
        assert max_norm > 0 or not any(x.any() for x in results)


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_random_thresholds(dtypes, seed):
    """The thresholds are near the norm, where rounding to nearest would break the bound in half of the cases."""
    leaves, there = drawn(10 + seed, dtypes, [(7, 3), (12,)])
    norm = math.sqrt(power_of_norm(on_host(leaves), 2))
    for max_norm in (norm * (1 - 2.0**-20), norm * 0.7, norm * 0.1, norm * (1 - 2.0**-40)):
        written, new, _ = clipped(there, max_norm)
        for results in map(on_host, (written, new)):
            assert at_most(results, 2, max_norm)
            assert power_of_norm(results, 2) >= (max_norm * (1 - max(map(TIGHT.get, dtypes)))) ** 2


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES], ids=str)
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_nothing_is_written_within_the_threshold(dtypes, ord):
    leaves, there = drawn(5, dtypes, SMALL, scale=1e-3)
    there[0][0, 0] = leaves[0][0, 0] = -0.0
    written, new, norm = clipped(there, float(gradclip.global_norm(leaves, ord)) * 1.001, ord)
    assert norm.isfinite()
    assert same_bits(written, leaves)
    assert same_bits(new, leaves)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float32, 1e-40),  # subnormal
        (torch.bfloat16, 1e38),
        (torch.bfloat16, 1e-39),
        (torch.float16, 1e4),
        (torch.float16, 1e-5),
        (torch.float16, 1e-7),
        (torch.float64, 1e200),
        (torch.float64, 1e-200),
        (torch.float64, 1e-310),
    ],
    ids=str,
)
def test_squares_that_overflow_or_underflow(dtype, scale):
    leaves = [torch.full((1000,), scale, dtype=dtype), torch.full((7, 3), -scale, dtype=dtype)]
    element = Fraction(abs(float(leaves[0][0])))
    wanted = element * Fraction(math.sqrt(1021))
    written, new, norm = clipped(moved(leaves), float(wanted / 8))
    told = float(torch.tensor(float(wanted), dtype=norm.dtype))  # rounded below the normal range of what is returned
    assert float(norm) == pytest.approx(told, rel=1e-6, abs=torch.finfo(norm.dtype).smallest_normal * 1e-6)
    smallest = float(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps  # the distance of subnormal numbers
    lost = TIGHT[dtype] + 4 * smallest * math.sqrt(1021) / float(wanted / 8)
    for results in map(on_host, (written, new)):
        assert at_most(results, 2, float(wanted / 8))
        assert lost >= 1 or power_of_norm(results, 2) >= Fraction(float(wanted / 8)) ** 2 * Fraction((1 - lost) ** 2)
    kept, _, _ = clipped(moved(leaves), float(wanted) * 2)
    assert same_bits(kept, leaves)


def test_a_norm_beyond_float32_still_clips():
    leaves = [torch.full((64,), 3e38)]  # norm 2.4e39
    written, new, norm = clipped(moved(leaves), 1.0)
    assert norm.dtype is torch.float32
    assert float(norm) == math.inf
    for results in map(on_host, (written, new)):
        assert at_most(results, 2, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_do_not_saturate(dtype):
    leaves = [torch.ones((), dtype=dtype, device=DEVICE) for _ in range(3000)]
    holders = held(leaves)
    assert float(gradclip.clip_grad_norm_(holders, 1.0)) == pytest.approx(math.sqrt(3000), rel=1e-6)
    assert at_most(on_host(grads(holders)), 2, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 65535, 65536, 131072])
def test_one_bad_element_anywhere(dtype, bad, place):
    x = torch.ones(131073, dtype=dtype, device=DEVICE)
    x[place] = bad
    written, new, norm = clipped([torch.ones(3, device=DEVICE), x], 1.0)
    assert not norm.isfinite()
    assert all(y.isnan().all() for y in (*written, *new))
    written, new, norm = clipped([x], 1.0, nonfinite="zero")
    assert float(norm) == pytest.approx(math.sqrt(131072), rel=1e-6)
    assert all(float(y[place]) == 0.0 for y in (*written, *new))
    assert all(int((y != 0).sum()) == 131072 for y in (*written, *new))


def test_a_tensor_as_the_threshold():
    leaves, there = drawn(6, (torch.float32, torch.bfloat16), SMALL)
    max_norm = torch.tensor(0.125, device=DEVICE)
    written, new, norm = clipped(there, max_norm)
    assert float(norm) == pytest.approx(float(gradclip.global_norm([x.double() for x in leaves])), rel=1e-6)
    assert at_most(on_host(written), 2, 0.125)
    assert power_of_norm(on_host(new), 2) >= (0.125 * 0.99) ** 2
