"""Gradients as they lie in memory: misaligned, permuted, with gaps, expanded and shared."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from on_gpu import DEVICE, DTYPES, drawn, grads, moved, numbers, on_host, parameters_with
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu
STEP = {torch.float32: 2.0**-23, torch.float64: 1e-12, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def check_clipped(before, after, max_norm):
    """Check that one number, at most max_norm / norm, has multiplied the elements, and that the bound is kept."""
    norm = math.sqrt(power_of_norm(on_host(before), 2))
    assert at_most(on_host(after), 2, max_norm)
    for x, y in zip(before, after, strict=True):
        step = 8 * STEP[x.dtype]
        (was,), (now,) = on_host([x]), on_host([y])
        np.testing.assert_allclose(now, was * (max_norm / norm), rtol=step, atol=torch.finfo(x.dtype).tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("size", [17, 5000, 70_001])
def test_misaligned_views_of_one_buffer(dtype, offset, size):
    """The elements around each view, which are huge, must neither be measured nor written."""
    (first, second), _ = drawn(20, (dtype,), [(size,), (size,)])
    flat = torch.full((2 * size + 16,), 3e4, dtype=dtype)
    starts = (offset, offset + size + 1)
    for start, part in zip(starts, (first, second), strict=True):
        flat[start : start + size] = part
    (there,) = moved([flat])
    views = [there[start : start + size] for start in starts]
    assert (views[0].data_ptr() - there.data_ptr()) == offset * first.element_size()
    holders = [SimpleNamespace(grad=view) for view in views]
    norm = gradclip.clip_grad_norm_(holders, 0.5)
    exact = math.sqrt(sum(float((x.double() ** 2).sum()) for x in (first, second)))
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assert all(one.grad is view for one, view in zip(holders, views, strict=True))
    after = there.cpu()
    around = [after[:offset], after[starts[0] + size : starts[1]], after[starts[1] + size :]]
    assert all((x == flat[0]).all() for x in around)
    if size <= 5000:
        check_clipped([first, second], views, 0.5)
    else:
        assert float(gradclip.grad_norm(holders)) == pytest.approx(0.5, rel=1e-2)


def permuted(kind, x):
    """Return a tensor with the same values that lies in memory in another order, or with gaps."""
    if kind == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if kind == "transposed":
        return x.transpose(0, 3).contiguous().transpose(0, 3)
    if kind == "every second":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 9e3, dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    wide = torch.full((x.shape[0] + 2, *x.shape[1:]), 9e3, dtype=x.dtype, device=x.device)
    wide[1:-1] = x
    return wide[1:-1, :, 1:]  # rows of a wider tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["channels_last", "transposed", "every second", "sliced"])
def test_strides(dtype, kind):
    _, (x, other) = drawn(21, (dtype,), [(5, 6, 7, 3), (11,)])
    x = permuted(kind, x)
    before = [y.clone() for y in (x, other)]
    holders = [SimpleNamespace(grad=x), SimpleNamespace(grad=other)]
    norm = gradclip.clip_grad_norm_(holders, 0.5)
    assert float(norm) == pytest.approx(math.sqrt(power_of_norm(on_host(before), 2)), rel=1e-6)
    assert holders[0].grad is x
    check_clipped(before, grads(holders), 0.5)
    clipped, _ = gradclip.clip_by_global_norm(before, 0.5)
    check_clipped(before, clipped, 0.5)
    base = x if x._base is None else x._base
    if kind in ("every second", "sliced"):
        assert int((base == torch.full_like(base, 9e3)).sum()) >= base.numel() - x.numel() - 5 * 7 * 3


def test_an_expanded_gradient_is_replaced():
    """All elements are one number in memory, as in the gradient of a sum: it has the norm of all of them."""
    weight = torch.nn.Parameter(torch.zeros(3, 12, device=DEVICE))
    weight.sum().backward()
    weight.grad = torch.ones((), device=DEVICE).expand(3, 12)
    assert float(gradclip.clip_grad_norm_([weight], 3.0)) == 6.0
    assert weight.grad.shape == (3, 12)
    element = weight.grad.unique().item()
    assert element > 0.4999
    assert 36 * Fraction(element) ** 2 <= 9


def test_an_expanded_gradient_beside_others():
    _, (x,) = drawn(22, (torch.float32,), [(40,)])
    holders = [SimpleNamespace(grad=numbers(2.0).expand(9)), SimpleNamespace(grad=x.clone())]
    norm = gradclip.clip_grad_norm_(holders, 1.0)
    assert float(norm) == pytest.approx(math.sqrt(36 + power_of_norm(on_host([x]), 2)), rel=1e-6)
    check_clipped([torch.full((9,), 2.0), x], grads(holders), 1.0)


def test_a_shared_gradient_counts_for_each_parameter_and_is_scaled_once():
    shared = numbers(3.0, 4.0)
    holders = [SimpleNamespace(grad=shared), SimpleNamespace(grad=shared)]
    norm = gradclip.clip_grad_norm_(holders, 1.0)
    assert float(norm) == pytest.approx(math.sqrt(50.0), rel=1e-6)
    assert at_most(on_host(grads(holders)), 2, 1.0)
    np.testing.assert_allclose(on_host([shared])[0], [3 / math.sqrt(50), 4 / math.sqrt(50)], rtol=1e-6)


def test_gradients_that_overlap_in_part():
    """Elements 1 and 2 lie in both gradients: they count twice and are scaled once."""
    flat = numbers(1.0, 2.0, 2.0, 4.0)
    holders = [SimpleNamespace(grad=flat[:3]), SimpleNamespace(grad=flat[1:])]
    norm = gradclip.clip_grad_norm_(holders, 1.0)
    assert float(norm) == pytest.approx(math.sqrt(1 + 4 + 4 + 4 + 4 + 16), rel=1e-6)
    np.testing.assert_allclose(on_host([flat])[0], np.array([1, 2, 2, 4]) / math.sqrt(33), rtol=1e-6)
    assert at_most(on_host(grads(holders)), 2, 1.0)


def test_a_parameter_listed_twice_counts_once():
    (weight,) = parameters_with([torch.tensor([3.0, 4.0])])
    assert float(gradclip.clip_grad_norm_([weight, weight], 1.0)) == 5.0
    np.testing.assert_allclose(on_host([weight.grad])[0], [0.6, 0.8], rtol=1e-6)


def test_two_views_of_one_flat_buffer_as_in_ddp():
    """Gradients that lie side by side in a bucket share a storage but no element."""
    bucket = torch.arange(1.0, 31.0).to(DEVICE)
    holders = [SimpleNamespace(grad=bucket[:10].view(2, 5)), SimpleNamespace(grad=bucket[10:])]
    norm = gradclip.clip_grad_norm_(holders, 1.0)
    wanted = math.sqrt(30 * 31 * 61 / 6)
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(on_host([bucket])[0], np.arange(1.0, 31.0) / wanted, rtol=1e-6)
    assert holders[0].grad.data_ptr() == bucket.data_ptr()


def test_integers_and_missing_gradients_are_left_out():
    counter = torch.tensor([100, 200], device=DEVICE)
    holders = [SimpleNamespace(grad=g) for g in (counter, None, numbers(3.0, 4.0))]
    assert float(gradclip.clip_grad_norm_(holders, 1.0)) == 5.0
    assert counter.tolist() == [100, 200]
    assert holders[1].grad is None
    np.testing.assert_allclose(on_host([holders[2].grad])[0], [0.6, 0.8], rtol=1e-6)


def test_complex_numbers_count_by_magnitude():
    x = torch.tensor([3.0 + 4.0j, 12.0]).to(DEVICE)
    holders = [SimpleNamespace(grad=x)]
    assert float(gradclip.clip_grad_norm_(holders, 6.5)) == 13.0
    np.testing.assert_allclose(x.cpu().numpy(), [1.5 + 2.0j, 6.0], rtol=1e-6)
