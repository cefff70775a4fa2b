"""Multi-tensor operations on a device without float64: norms from pairs of float32, one multiplication for all."""

import math
from fractions import Fraction

import pytest
import torch

import gradclip
from gradclip._src.backends.torch import device
from gradclip.integrations.torch import clip_grads_with_norm_
from on_a_device import DEVICE, DTYPES, Count, exact, grads, held, leaves_of
from rational import at_most, power_of_norm


@pytest.fixture(autouse=True)
def without(monkeypatch):
    monkeypatch.setattr(device, "_has_float64", lambda _: False)


@pytest.mark.parametrize("wide", [False, True])
def test_a_threshold_becomes_no_larger(monkeypatch, wide):
    monkeypatch.setattr(device, "_has_float64", lambda _: wide)
    whole = [torch.tensor(n) for n in (2**24 + 3, 2**31 - 1, 2**53 + 3, 2**63 - 1)]
    for threshold in (1e-22, 0.1, 1e-3, torch.tensor(0.1, dtype=torch.float64), *whole):
        given = threshold.item() if isinstance(threshold, torch.Tensor) else threshold
        for scale in (1.0, 3.0):
            leaf = torch.tensor([given * scale], dtype=torch.float64 if wide else torch.float32)
            with DEVICE.mode():
                clipped, _ = gradclip.clip_by_global_norm([leaf], threshold, ord=math.inf)
                clamped = gradclip.clip_by_value([leaf], threshold)
            for found in (clipped[0].item(), clamped[0].item()):
                assert given * (1 - 3e-6) <= Fraction(found) <= Fraction(given)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_the_bound_holds(dtype, ord):
    for scale in (2.0**-8, 1.0, 2.0**3):
        leaves = leaves_of(9, dtype, scale)
        with DEVICE.mode():
            norm = float(gradclip.global_norm(leaves, ord))
            assert gradclip.global_norm(leaves, ord).dtype is torch.float32
            for share in (1e-3, 0.5, 1 - 1e-5, 1 - 1e-7, 1.0, 1 + 1e-7, 1 + 1e-4):
                check_clipped(leaves, ord, norm, float(norm * share))


def check_clipped(leaves, ord, norm, threshold):
    holders = held(leaves)
    with Count() as count:
        gradclip.clip_grad_norm_(holders, threshold, ord)
    assert at_most(exact(grads(holders)), ord, threshold)
    assert sum(n for name, n in count.operations.items() if "where" in name) <= 12
    if threshold > norm * (1 + 5e-5):
        assert all(x.equal(y) for x, y in zip(grads(holders), leaves, strict=True))
    elif ord == 2:
        smallest = 0.98 if leaves[0].dtype.itemsize == 2 else 1 - 1e-4
        assert power_of_norm(exact(grads(holders)), 2) >= (threshold * smallest) ** 2


def test_extreme_norms_and_thresholds():
    for scale in (2.0**-140, 2.0**-100, 1.0, 2.0**120, 2.0**127):
        leaves = [torch.tensor([1.0, 0.5, 0.75]) * scale, torch.tensor([1.5, 0.25]) * scale]
        for threshold in (0.0, 2.0**-130, 2.0**-70, 2.0**-59, 1.0, 2.0**99, 2.0**110, 2.0**126, math.inf):
            with DEVICE.mode():
                new, _ = gradclip.clip_by_global_norm(leaves, threshold)
                layers, _ = gradclip.clip_by_layer_norm(leaves, threshold)
            if threshold < math.inf:
                assert at_most(exact(new), 2, threshold)
                assert all(at_most(exact([x]), 2, threshold) for x in layers)
            if threshold > 3 * scale:
                assert all(x.equal(y) for x, y in zip(new, leaves, strict=True))
                assert all(x.equal(y) for x, y in zip(layers, leaves, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_policies(bad):
    leaves = [torch.tensor([3.0, bad]), torch.tensor([4.0])]
    with DEVICE.mode():
        assert all(x.isnan().all() for x in gradclip.clip_by_global_norm(leaves, 1.0)[0])
        assert all(x.isnan().all() for x in gradclip.clip_by_global_norm(leaves, math.inf)[0])
        assert not any(x.any() for x in gradclip.clip_by_global_norm(leaves, 1.0, nonfinite="drop")[0])
        zeroed, norm = gradclip.clip_by_global_norm(leaves, 1.0, nonfinite="zero")
    assert float(norm) == pytest.approx(5.0, rel=1e-6)
    assert [float(zeroed[0][0]), float(zeroed[0][1]), float(zeroed[1][0])] == pytest.approx([0.6, 0.0, 0.8], rel=1e-5)


def test_a_known_norm_and_tensors_for_thresholds():
    leaves = leaves_of(10, torch.float32)
    for threshold in (1.0, torch.tensor(1.0)):
        holders = held(leaves)
        with DEVICE.mode():
            clip_grads_with_norm_(holders, threshold, gradclip.global_norm(leaves))
            new, _ = gradclip.clip_by_global_norm(leaves, threshold)
        for some in (new, grads(holders)):
            assert power_of_norm(exact(some), 2) >= (1 - 1e-4) ** 2
        assert at_most(exact(new), 2, 1.0)
