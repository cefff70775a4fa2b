"""bfloat16 in two steps: few launches for all tensors, the bound in exact arithmetic, and how tight it is."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradclip
from gradclip._src.backends.torch import multi_tensor
from gradclip._src.backends.torch.multi_tensor import _factor_and_divisor
from on_a_device import DEVICE, Count, exact, grads, held
from rational import at_most, power_of_norm

SIZES = [(3, 5), (), (7,), (1,), (0,)] * 4
TIGHT = Fraction(99, 100)


class Multiplications(TorchDispatchMode):
    """Notes which operations multiply or divide tensors, and how many tensors each takes."""

    def __init__(self):
        super().__init__()
        self.lists, self.each, self.launches = Counter(), 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("aten._foreach_mul", "aten._foreach_div")):
            self.launches[name] += 1
            if isinstance(args[1], torch.Tensor):
                assert args[1].dtype is args[0][0].dtype  # else the fast path is not taken
                assert args[1].ndim == 0
            elif isinstance(args[1], (list, tuple)):
                self.lists[name] += len(args[1])
        elif name.startswith(("aten.mul", "aten.div")) and any(x.ndim for x in tree_leaves(args) if torch.is_tensor(x)):
            self.each += 1
        return func(*args, **(kwargs or {}))


def leaves_of(rng, scale=1.0):
    return [torch.tensor(rng.standard_normal(size) * scale).bfloat16() for size in SIZES]


def clipped(leaves, max_norm, ord=2, **options):
    """Return what both calls make of the leaves, after checking that it is the same."""
    holders = held(leaves)
    with DEVICE.mode():
        gradclip.clip_grad_norm_(holders, max_norm, ord, **options)
        new, _ = gradclip.clip_by_global_norm(leaves, max_norm, ord=ord, **options)
    assert all(bits(x).equal(bits(y)) for x, y in zip(new, grads(holders), strict=True))
    return new


def bits(x):
    return x.view(torch.int16)


def test_no_tensor_has_a_launch_of_its_own_on_cuda():
    with FakeTensorMode():
        leaves = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in [(768, 768), (768,), ()] * 50]
        for nonfinite in ("propagate", "drop"):
            with Multiplications() as found, Count() as count:
                gradclip.clip_grad_norm_(held(leaves), 1.0, nonfinite=nonfinite)
            assert not found.lists
            assert not found.each
            assert found.launches["aten._foreach_mul_.Tensor"] == 1 + (nonfinite == "drop")
            assert found.launches["aten._foreach_div_.Tensor"] == 1
            assert not any("_amp_" in name for name in count.operations)
        with Multiplications() as found:
            gradclip.clip_by_global_norm(leaves, 1.0)
        assert found.launches == {"aten._foreach_mul.Tensor": 1, "aten._foreach_div_.Tensor": 1}
        assert not found.lists


def test_large_tensors_are_read_once_in_float32():
    with FakeTensorMode():
        large = [torch.empty(2**21 + i, dtype=torch.bfloat16, device="cuda") for i in range(3)]
        small = [torch.empty(2**21 - 1 - i, dtype=torch.bfloat16, device="cuda") for i in range(9)]
        for leaves, each in ((small + large, 3), (small[:8] + large, 11), (large, 3), (small, 0)):
            with Multiplications() as found:
                gradclip.clip_grad_norm_(held(leaves), 1.0)
                gradclip.clip_by_global_norm(leaves, 1.0)
            assert found.lists == ({"aten._foreach_mul_.List": 2 * each} if each else {})
            assert found.launches["aten._foreach_div_.Tensor"] == (2 if len(leaves) - each else 0)


@pytest.mark.parametrize("exponent", [0, -1, -25, -125, -126, -127, -131])
def test_the_two_numbers_are_at_most_the_coefficient_and_near_it(exponent):
    rng = np.random.default_rng(exponent + 200)
    significands = [*rng.integers(0, 2**23, 300), *range(2**15, 2**23, 2**16), *range(0, 2**23, 2**16), 1, 2**23 - 1]
    numbers = np.float32(2.0**exponent * (0.5 + np.float64(significands) * 2.0**-24))
    for c in [np.float32(2.0**exponent), *numbers]:
        factor, divisor = _factor_and_divisor(torch.tensor(c), torch.device("cpu"))
        assert factor.dtype is divisor.dtype is torch.bfloat16
        f, s = Fraction(float(factor)), Fraction(float(divisor))
        assert 1 in (f, s)
        assert s >= 1
        assert f / s <= Fraction(float(c))
        if c >= 2.0**-126:
            assert f / s >= Fraction(float(c)) * (1 - Fraction(59, 10_000))


def test_numbers_for_coefficients_that_are_special():
    for c, expected in ((1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (2.0**-149, 0.0), (2.0**-133, 2.0**-133)):
        assert [float(x) for x in _factor_and_divisor(torch.tensor(c), torch.device("cpu"))] == [expected, 1.0]
    for pattern in (0x7FC00000, 0x7FFFFFFF, -1, -0x400000):
        nan = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
        factor, divisor = _factor_and_divisor(nan, torch.device("cpu"))
        assert (torch.tensor([0.0, 2.0, math.inf]).bfloat16() * factor / divisor).isnan().all()


def test_products_of_all_numbers_are_rounded_once():
    x = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    u, half_step = Fraction(1, 2**8) + Fraction(1, 2**22), Fraction(1, 2**134) + Fraction(1, 2**150)
    for c in (0.3, 0.5078125, 0.6640625, 0.999, 1 - 2.0**-24, 3e-39, 1e-30):
        c = torch.tensor(c)
        factor, divisor = _factor_and_divisor(c, torch.device("cpu"))
        products = x.clone()
        torch._foreach_mul_([products], factor)
        torch._foreach_div_([products], divisor)
        number = Fraction(float(c))
        for given, y in zip(x[::7].tolist(), products[::7].tolist(), strict=True):
            most = number * Fraction(given)
            assert Fraction(y) <= max(most * (1 + u), most + half_step)


@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_the_bound_holds_for_coefficients_of_any_size(ord):
    rng = np.random.default_rng(7)
    for _ in range(40):
        leaves = leaves_of(rng, 2.0 ** rng.integers(-60, 60))
        with DEVICE.mode():
            norm = float(gradclip.global_norm(leaves, ord))
        for share in (2.0 ** -rng.uniform(0.01, 1), 10.0 ** -rng.uniform(0, 20), 1 - 1e-5, 1.0, 1 + 1e-5):
            threshold = norm * float(share)
            new = exact(clipped(leaves, threshold, ord))
            assert at_most(new, ord, threshold)
            if share < 1 and ord == 2:
                assert power_of_norm(new, 2) >= (Fraction(threshold) * Fraction(988, 1000)) ** 2
            if share > 1:
                assert all(bits(x).equal(bits(torch.tensor(y).bfloat16())) for x, y in zip(leaves, new, strict=True))


def test_results_of_random_data_have_99_hundredths_of_the_threshold():
    rng = np.random.default_rng(11)
    leaves = [torch.tensor(rng.standard_normal(400)).bfloat16() for _ in range(12)]
    for threshold in np.geomspace(1.0, 2.0, 150):
        new = exact(clipped(leaves, float(threshold)))
        assert at_most(new, 2, float(threshold))
        assert power_of_norm(new, 2) >= (TIGHT * Fraction(float(threshold))) ** 2


def test_the_worst_numbers_do_not_exceed_the_threshold():
    # Products of numbers with one significand are all rounded alike, up in many cases.
    for significand in range(128, 256, 5):
        leaves = [torch.full((3,), float(significand)).bfloat16() for _ in range(12)]
        for threshold in (1.0, 0.3, 700.0, 1e-30, 1e-37, 4e-39, 1e-40, 1e-45):
            assert at_most(exact(clipped(leaves, threshold)), 2, threshold)


def test_subnormals_zeros_and_thresholds_at_the_ends():
    tiny = [torch.tensor([2.0**-133, -(2.0**-130), 0.0, -0.0, 2.0**-126]).bfloat16() for _ in range(10)]
    for leaves in (tiny, [*tiny, torch.tensor(3.0).bfloat16()], [torch.zeros(2).bfloat16()] * 10):
        for threshold in (0.0, 1e-45, 1e-38, 1.0, torch.tensor(0.0), torch.tensor(1e-45), torch.tensor(1.0)):
            assert at_most(exact(clipped(leaves, threshold)), 2, float(threshold))
        for threshold in (4.0, 1e30, math.inf, torch.tensor(math.inf)):
            assert all(bits(x).equal(bits(y)) for x, y in zip(clipped(leaves, threshold), leaves, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_policies(bad):
    leaves = [torch.tensor([3.0, 4.0]).bfloat16() for _ in range(10)] + [torch.tensor(bad).bfloat16()]
    for threshold in (1.0, 1e6, torch.tensor(1.0)):
        assert all(x.isnan().all() for x in clipped(leaves, threshold))
        assert not any(x.any() for x in clipped(leaves, threshold, nonfinite="drop"))
        zeroed = clipped(leaves, threshold, nonfinite="zero")
        assert zeroed[-1] == 0
        assert at_most(exact(zeroed), 2, float(threshold))
        assert power_of_norm(exact(zeroed), 2) >= (min(float(threshold), 15.8) * 0.985) ** 2


def test_large_tensors_beside_small_ones_and_other_dtypes(monkeypatch):
    monkeypatch.setattr(multi_tensor, "_LARGE", 40)
    rng = np.random.default_rng(3)
    sizes = [(50,), (30,), (), (8, 5), (4, 4)] * 4
    leaves = [torch.tensor(rng.standard_normal(size)).bfloat16() for size in sizes]
    leaves += [torch.tensor(rng.standard_normal(9)).to(dtype) for dtype in (torch.float32, torch.float16)]
    leaves[5] = leaves[8].T
    for threshold in (0.0, 1e-45, 0.77, 3.0, 1e3):
        new = exact(clipped(leaves, threshold))
        assert at_most(new, 2, threshold)
        assert not 0.5 < threshold < 10 or power_of_norm(new, 2) >= (TIGHT * Fraction(threshold)) ** 2
        for x, y in zip(exact(leaves), new, strict=True):
            assert np.all(x * y >= 0)
