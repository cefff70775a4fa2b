"""Multi-tensor operations for what is less usual: tensors for thresholds, layers in place, float16, complex numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from gradclip.integrations.torch import clip_grads_with_norm_
from on_a_device import DEVICE, DTYPES, SHAPES, Count, exact, grads, held, leaves_of
from rational import at_most, power_of_norm


def least(dtype):
    """Return what results have of the threshold at least."""
    return 0.99 if dtype.itemsize == 2 else 1 - 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_tensors_for_thresholds(dtype, ord):
    leaves = leaves_of(0, dtype)
    with DEVICE.mode():
        norm = float(gradclip.global_norm(leaves, ord))
        for number in (0.0, norm * 0.3, norm * 1.01, math.inf):
            threshold = torch.tensor(number, dtype=torch.float64)
            holders = held(leaves)
            with Count() as count:
                found = gradclip.clip_grad_norm_(holders, threshold, ord)
            assert count.total() <= 70
            assert float(found) == norm
            assert number == math.inf or at_most(exact(grads(holders)), ord, number)
            if number > norm:
                assert all(x.equal(y) for x, y in zip(grads(holders), leaves, strict=True))
            elif ord == 2:
                assert power_of_norm(exact(grads(holders)), 2) >= (number * least(dtype)) ** 2
            new, _ = gradclip.clip_by_global_norm(leaves, threshold, ord=ord)
            assert all(x.equal(y) for x, y in zip(new, grads(holders), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensors_for_thresholds_hold_the_bound(dtype):
    rng = np.random.default_rng(3)
    for exponent in range(-1070, 0, 11):
        leaves = [torch.tensor(rng.standard_normal(9) * 2.0**exponent).to(dtype), torch.ones(3, dtype=dtype)]
        threshold = 1.7 * 2.0**exponent
        for some in (leaves, leaves[:1]):
            holders = held(some)
            with DEVICE.mode():
                gradclip.clip_grad_norm_(holders, torch.tensor(threshold, dtype=torch.float64))
            assert at_most(exact(grads(holders)), 2, threshold)


def test_thresholds_that_are_negative_or_nan_on_a_device():
    leaves = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    for number, expected in ((-1.0, 0.0), (math.nan, math.nan)):
        holders = held(leaves)
        with DEVICE.mode():
            gradclip.clip_grad_norm_(holders, torch.tensor(number))
        np.testing.assert_array_equal(holders[0].grad, [expected] * 2)
    holders = held(leaves[1:])
    with DEVICE.mode():
        gradclip.clip_grad_norm_(holders, torch.tensor(-1.0))
        clip_grads_with_norm_(holders, torch.tensor(-1.0), 0.0)
    assert not holders[0].grad.any()


def test_layers_with_tensors_for_thresholds():
    leaves = leaves_of(1, torch.float32)
    thresholds = [torch.tensor(0.5 + i) for i in range(len(leaves))]
    holders = held(leaves)
    with DEVICE.mode(), Count() as count:
        new, _ = gradclip.clip_by_layer_norm(leaves, thresholds)
        gradclip.clip_grad_layer_norm_(holders, thresholds)
    assert count.total() <= 70 + 3 * len(leaves)
    for x, y, c in zip(new, grads(holders), thresholds, strict=True):
        assert x.equal(y)
        assert at_most(exact([x]), 2, float(c))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_layers_are_clipped_in_place_as_they_are_in_a_new_tree(dtype, ord):
    leaves = leaves_of(2, dtype)
    for thresholds in (0.5, [0.25 + i / 4 for i in range(len(leaves))]):
        holders = [*held(leaves), SimpleNamespace(grad=None)]
        given = thresholds if isinstance(thresholds, float) else [*thresholds, 1.0]
        with DEVICE.mode():
            with Count() as count:
                norms = gradclip.clip_grad_layer_norm_(holders, given, ord=ord)
            new, expected = gradclip.clip_by_layer_norm(leaves, thresholds, ord=ord)
        assert count.total() <= 50
        assert norms[-1] is None
        assert [float(x) for x in norms[:-1]] == [float(x) for x in expected]
        assert all(x.equal(one.grad) for x, one in zip(new, holders, strict=False))


@pytest.mark.after_error
def test_layers_of_several_dtypes_and_policies():
    leaves = [torch.tensor([3.0, math.nan], dtype=dtype) for dtype in DTYPES] + [torch.tensor([3.0, 4.0])]
    results = {}
    for policy in ("zero", "drop", "propagate"):
        holders = held(leaves)
        with DEVICE.mode():
            norms = gradclip.clip_grad_layer_norm_(holders, 1.0, nonfinite=policy)
            results[policy], _ = gradclip.clip_by_layer_norm(leaves, 1.0, nonfinite=policy)
        assert [norm.dtype for norm in norms] == [torch.float32] * 3 + [torch.float64, torch.float32]
        for x, y in zip(grads(holders), results[policy], strict=True):
            np.testing.assert_array_equal(x.double(), y.double())
            assert x.dtype == y.dtype
    assert not results["drop"][0].any()
    assert 0.99 <= float(results["zero"][2][0]) <= 1
    holders = held(leaves)
    with DEVICE.mode(), pytest.raises(FloatingPointError, match="1 NaN"):
        gradclip.clip_grad_layer_norm_(holders, 1.0, nonfinite="raise")
    np.testing.assert_array_equal(holders[-1].grad, [3.0, 4.0])
    with DEVICE.mode(), pytest.raises(FloatingPointError, match="1 NaN"):
        gradclip.clip_by_layer_norm(leaves, 1.0, nonfinite="raise")


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_float16_is_clipped_to_small_thresholds(ord):
    rng = np.random.default_rng(4)
    for exponent in range(-24, 4):
        leaves = [torch.tensor(rng.standard_normal(shape) * 2.0 ** rng.integers(-14, 4)).half() for shape in SHAPES[:4]]
        holders, threshold = held(leaves), 1.3 * 2.0**exponent
        with DEVICE.mode():
            norm = float(gradclip.clip_grad_norm_(holders, threshold, ord))
            new, _ = gradclip.clip_by_global_norm(leaves, threshold, ord=ord)
            layers, _ = gradclip.clip_by_layer_norm(leaves, threshold, ord=ord)
        assert all(x.equal(y) for x, y in zip(new, grads(holders), strict=True))
        assert all(at_most(exact([x]), ord, threshold) for x in layers)
        results = exact(new)
        assert at_most(results, ord, threshold)
        for x, y in zip(exact(leaves), results, strict=True):
            assert np.all(np.abs(y) >= np.abs(x) * min(1.0, threshold / norm) * 0.995 - 2.5 * 2.0**-24)
            assert np.all(x * y >= 0)


def test_float16_that_is_kept_keeps_its_bits_where_it_would_be_moved():
    x = torch.arange(-0x7FFF, 0x7C00, 7, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = torch.cat([x[x.isfinite()] / 64, torch.tensor([-0.0, 0.0], dtype=torch.float16)])
    holders = held([x])
    with DEVICE.mode():
        norm = gradclip.clip_grad_norm_(holders, 1e9, 1)
        assert float(norm) < 1e9
        gradclip.clip_grad_norm_(holders, torch.tensor(1e9))
        clip_grads_with_norm_(holders, 1e-9, 1e-9)
    assert holders[0].grad.view(torch.int16).equal(x.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_complex_gradients(dtype, policy):
    leaves = [*leaves_of(5, dtype), *leaves_of(6, torch.float32)]
    leaves[2] = leaves[2].T
    for number in (5.0, 1e9):
        for threshold in (number, torch.tensor(number)):
            holders = [SimpleNamespace(grad=x.clone(memory_format=torch.preserve_format)) for x in leaves]
            with DEVICE.mode():
                with Count() as count:
                    norm = gradclip.clip_grad_norm_(holders, threshold, nonfinite=policy)
                new, same = gradclip.clip_by_global_norm(leaves, threshold, nonfinite=policy)
            assert count.total() <= 110 + (3 * len(leaves) if policy != "propagate" else 0)
            assert float(norm) == float(same)
            expected = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in exact(leaves)))
            assert float(norm) == pytest.approx(expected, rel=1e-6)
            for x, y, given in zip(grads(holders), new, leaves, strict=True):
                assert x.equal(y)
                assert (x.dtype, x.shape) == (given.dtype, given.shape)
                assert number < 1e9 or x.equal(given)
            if number == 5.0:
                parts = [torch.view_as_real(x) if x.is_complex() else x for x in new]
                assert at_most(exact(parts), 2, 5.0)
                assert power_of_norm(exact(parts), 2) >= (5.0 * (1 - 1e-6)) ** 2


def test_complex_elements_that_are_not_finite_go_as_a_whole():
    leaves = [torch.tensor([3 + 4j, complex(1, math.inf)], dtype=torch.complex64), torch.tensor([1.0])]
    holders = held(leaves)
    with DEVICE.mode():
        norm = gradclip.clip_grad_norm_(holders, 100.0, nonfinite="zero")
        layers = gradclip.clip_by_layer_norm(leaves, 100.0, nonfinite="zero")[0]
    assert float(norm) == pytest.approx(26**0.5)
    assert holders[0].grad.tolist() == layers[0].tolist() == [3 + 4j, 0]


@pytest.mark.parametrize("ord", [1, 2, 3, math.inf, -math.inf])
def test_complex_gradients_of_any_order_and_size(ord):
    for scale in (1e-300, 1.0, 1e300):
        leaves = leaves_of(7, torch.complex128, scale)[:8]
        expected = np.linalg.norm(np.concatenate([x.ravel() / scale for x in exact(leaves)]), ord)
        with DEVICE.mode():
            assert float(gradclip.global_norm(leaves, ord)) == pytest.approx(expected * scale, rel=1e-12)
            new, _ = gradclip.clip_by_global_norm(leaves, scale * 0.5, ord=ord)
            norms = gradclip.layer_norms(leaves, ord)
        found = np.linalg.norm(np.concatenate([x.ravel() / scale for x in exact(new)]), ord)
        assert found == pytest.approx(min(0.5, expected), rel=1e-11)
        for x, norm in zip(exact(leaves), norms, strict=True):
            assert float(norm) == pytest.approx(np.linalg.norm(x.ravel() / scale, ord) * scale, rel=1e-12)


def test_conjugated_and_expanded_gradients_are_replaced():
    x = torch.tensor([3 + 4j, 1j])
    for lazy in (x.conj(), torch.tensor(1 + 1j).expand(3, 2)):
        held_lazily = [SimpleNamespace(grad=lazy), SimpleNamespace(grad=torch.ones(2, dtype=torch.complex64))]
        with DEVICE.mode():
            gradclip.clip_grad_norm_(held_lazily, 1.0)
        assert held_lazily[0].grad is not lazy
        parts = [torch.view_as_real(one.grad.resolve_conj()) for one in held_lazily]
        assert at_most(exact(parts), 2, 1.0)
