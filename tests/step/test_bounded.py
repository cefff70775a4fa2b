"""What a step has changed is at most the bound, in exact arithmetic."""

from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import gradclip._src.step.bounded as bounded
from gradclip._src.step.bounded import shorten
from on_a_device import Count


@pytest.fixture(autouse=True, params=[(2**20, 0), (2, 0), (2**20, 2**13)], ids=["whole", "pieces", "together"])
def in_cache(request, monkeypatch):
    monkeypatch.setattr(bounded, "_IN_CACHE", request.param[0])
    monkeypatch.setattr(bounded, "_SMALL", request.param[1])


def exact(values):
    flat = torch.view_as_real(values) if values.is_complex() else values
    return [Fraction(x) for x in flat.double().flatten().tolist()]


def squared_distance(after, before):
    return sum((x - y) ** 2 for x, y in zip(exact(after), exact(before), strict=True))


@pytest.mark.parametrize("rate", [1e-3, 0.1, 3e-7, 1e-30])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_the_bound_holds_for_what_is_stored(dtype, scale, rate):
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(n, dtype=torch.float64, generator=generator).to(dtype) * scale for n in (1, 7, 400)]
    for size, max_rms in ((0.3, 0.2), (1.0, 1.0), (50.0, 1.0), (1.0, 0.0)):
        after = [one + (torch.randn(one.shape, generator=generator) * size * rate).to(dtype) for one in before]
        shorten(after, before, rate, max_rms)
        for one, other in zip(after, before, strict=True):
            assert squared_distance(one, other) <= one.numel() * (Fraction(max_rms) * Fraction(rate)) ** 2


@pytest.mark.parametrize(("dtype", "nearly"), [(torch.float32, 0.9999), (torch.float64, 0.9999), (torch.bfloat16, 0.9)])
def test_the_bound_is_reached(dtype, nearly):
    before = torch.linspace(-1.0, 1.0, 100, dtype=dtype)
    after = before + torch.linspace(1.0, 3.0, 100, dtype=dtype)
    shorten([after], [before], 0.25, 1.0)
    assert squared_distance(after, before) >= nearly**2 * 100 * Fraction(0.25) ** 2


def test_an_update_within_the_bound_stays_bit_by_bit_and_one_beyond_keeps_its_direction():
    before = [torch.tensor([1.0, -0.0]), torch.zeros(2)]
    after = [torch.tensor([1.1, -0.0]), torch.tensor([3.0, -4.0])]
    kept = after[0].clone()
    largest = shorten(after, before, 0.5, 1.0)
    assert after[0].view(torch.int32).tolist() == kept.view(torch.int32).tolist()
    assert after[1].tolist() == pytest.approx([3.0 / 5.0 * 0.5**0.5, -4.0 / 5.0 * 0.5**0.5])
    assert largest.item() == pytest.approx(5.0 / 2.0**0.5 / 0.5)


@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside"])
@pytest.mark.parametrize("tiny", [0.0, 1e-200, 3e-162, 1e-40])
def test_what_pieces_do_not_tell_is_decided_as_a_whole(tiny, beside):
    """Squares that are 0 in float64 hide nothing, and a piece without changes is no obstacle."""
    before = torch.zeros(8, dtype=torch.float64)
    after = before + torch.tensor([tiny, tiny, 0.0, 0.0, tiny, 0.0, 0.0, 0.0], dtype=torch.float64)
    another = [torch.tensor([0.5], dtype=torch.float64)] * beside
    both = [after, *another], [before, *(0.0 * one for one in another)]
    assert shorten(*both, 1.0, 1.0).item() == pytest.approx(0.5 if beside else tiny * (3 / 8) ** 0.5, abs=1e-45)
    shorten(*both, tiny / 8.0, 1.0)
    assert squared_distance(after, before) <= 8 * (Fraction(tiny) / 8) ** 2


def test_squares_that_are_rounded_much_are_not_believed():
    """The square of 2.6e-162 is rounded to that of 2.2e-162."""
    after = [torch.full((8,), 2.6e-162, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    before = [torch.zeros_like(one) for one in after]
    shorten(after, before, 2.4e-162, 1.0)
    assert squared_distance(after[0], before[0]) <= 8 * Fraction(2.4e-162) ** 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_stays(value):
    after = [torch.tensor([value, 5.0]), torch.tensor([5.0])]
    largest = shorten(after, [torch.zeros(2), torch.zeros(1)], 1.0, 1.0)
    assert not largest.isfinite()
    assert after[0][1] == 5.0
    assert not after[0][0].isfinite()
    assert after[1].item() == pytest.approx(1.0)


@pytest.mark.parametrize("at_once", [3, 20])
def test_what_is_rewritten_in_slices_is_the_same(at_once, monkeypatch):
    before = [torch.randn(5, 3, 2).transpose(0, 2), torch.tensor(2.0), torch.randn(4, dtype=torch.complex64)]
    before += [torch.randn(7).bfloat16(), torch.randn(6)]
    after, again = ([one + 7.0 for one in before] for _ in range(2))
    rate = torch.tensor(0.1)  # as on an accelerator
    shorten(after, before, rate, 1.0)
    monkeypatch.setattr(bounded, "_AT_ONCE", at_once)
    shorten(again, before, rate, 1.0)
    assert all(map(torch.equal, after, again))
    assert after[0].stride() == again[0].stride() == before[0].stride()


def test_pieces_are_as_they_lie_in_memory(monkeypatch):
    """Any other order takes many times as long."""
    pieces, change = [], bounded._change
    monkeypatch.setattr(bounded, "_change", lambda new, *rest: pieces.append(new) or change(new, *rest))
    for before in (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3, 4).t()):
        shorten([before + 7.0], [before], 0.1, 1.0)
    assert all(piece.is_contiguous() for piece in pieces)


class Quantized(torch.Tensor):
    """Weights of which operations get copies. So what is written to `out`, or to a result, does not reach them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].inner.copy_(args[1])
            return args[0]
        is_view = func.overloadpacket.__name__ in ("permute", "split", "detach")
        args, kwargs = tree_map_only(cls, lambda one: one.inner if is_view else one.inner.float(), (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs)) if is_view else func(*args, **kwargs)


def test_subclasses_that_compute_with_copies_are_shortened():
    before, after = torch.linspace(-1.0, 1.0, 24).bfloat16().reshape(6, 4), torch.full((6, 4), 9.0).bfloat16()
    shorten([Quantized(after)], [Quantized(before)], 0.25, 1.0)
    assert squared_distance(after, before) == pytest.approx(24 * 0.25**2, rel=0.02)


def test_operations_on_a_device_do_not_grow_with_the_number_of_parameters():
    """But for a cast of each threshold."""

    def counted(number):
        with FakeTensorMode(), Count() as found:
            before, after = ([torch.empty(7, 3, device="cuda") for _ in range(number)] for _ in range(2))
            shorten(after, before, torch.empty((), device="cuda"), 1.0)
        return found.operations

    few, many = counted(10), counted(100)
    assert many["aten.nextafter.default"] == 1
    assert many.pop("aten._to_copy.default") - few["aten._to_copy.default"] <= 90
    assert {name for name in many if many[name] != few[name]} <= {"prim.device.default", "aten.empty.memory_format"}


def test_a_norm_beyond_the_range_of_numbers_is_shortened():
    before = torch.zeros(4, dtype=torch.float64)
    after = before + 1e308
    assert shorten([after], [before], 1.0, 1.0) == float("inf")
    assert squared_distance(after, before) <= 4


def test_an_update_just_below_0_99999_of_the_bound_stays_bit_by_bit():
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randn(1000, generator=generator) for _ in range(2))
    kept, rms = after.clone(), (after - before).double().pow(2).mean().sqrt().item()
    shorten([after], [before], rms / 0.9999899, 1.0)
    assert torch.equal(after, kept)


@pytest.mark.parametrize("max_rms", [0.25, 0.0, float("inf")])
def test_nothing_waits_where_the_learning_rate_stays_on_the_device(max_rms):
    """As a tensor on an accelerator: the same to rounding, without a decision on the host."""
    before = [torch.linspace(-1.0, 1.0, 9), torch.zeros(3)]
    steps = [torch.linspace(2.0, 4.0, 9), torch.tensor([0.01, 0.0, 0.0])]
    after, again = ([one + step for one, step in zip(before, steps, strict=True)] for _ in range(2))
    one, other = shorten(after, before, 0.5, max_rms), shorten(again, before, torch.tensor(0.5), max_rms)
    assert one == other
    for mine, theirs in zip(after, again, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)
    assert squared_distance(again[0], before[0]) <= 9 * Fraction(0.5 * min(max_rms, 10.0)) ** 2


def test_without_a_learning_rate_nothing_moves():
    after, before = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    assert shorten([after], [before], 0.0, 1.0).item() == float("inf")
    assert after.tolist() == [1.0, 1.0]
    assert shorten([after], [before], 0.0, 1.0).item() == 0.0
