"""Side by side with `lucid.nn.util` on Lucid's device "gpu": arrays of MLX, on the CPU where Metal is missing."""

import math

import lucid
import mlx.core as mx
import numpy as np
import pytest
from lucid import nn
from lucid.nn import util as peer

import gradclip
from gradclip.integrations import lucid as ours
from parity_support import assert_just_below, assert_matches, count_of, reference_norm, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:Metal GPU acceleration is not supported")
DTYPES = ("float16", "float32")


def leaves(dtype):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((5, 3), (17,), ())]


def parameter(grad, dtype=None):
    made = nn.Parameter(np.zeros(np.shape(grad), np.float32)).to("gpu")
    made.grad = mx.array(grad) if dtype is None else mx.array(grad, dtype=dtype)
    return made


def clipped(call, arrays, *args):
    ps = [*map(parameter, arrays), nn.Parameter(np.zeros(2, np.float32)).to("gpu")]
    returned = call(ps, *args)
    assert ps[-1].grad is None
    assert all(type(p.grad) is mx.array for p in ps[:-1])
    return [np.array(p.grad) for p in ps[:-1]], returned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_norm", [0.25, 64.0])
@pytest.mark.parametrize("norm_type", [1, 2, 3])
def test_clip_grad_norm(dtype, max_norm, norm_type):
    arrays = leaves(dtype)
    norm = reference_norm(arrays, norm_type)
    mine, my_norm = clipped(ours.clip_grad_norm, arrays, max_norm, norm_type)
    theirs, their_norm = clipped(peer.clip_grad_norm, arrays, max_norm, norm_type)
    factor = min(1.0, max_norm / (norm + 1e-7))
    exact = tolerance(dtype, count_of(arrays), ord=norm_type)
    for leaf, my_leaf, their_leaf in zip(arrays, mine, theirs, strict=True):
        assert my_leaf.dtype == leaf.dtype
        assert_matches(my_leaf, leaf.astype(np.float64) * factor, exact, dtype)
        np.testing.assert_allclose(my_leaf, their_leaf, rtol=2e-2 if dtype == "float16" else 2e-6)
    assert type(my_norm) is type(their_norm) is lucid.Tensor
    assert (my_norm.shape, my_norm.device) == (their_norm.shape, their_norm.device)
    assert my_norm.item() == pytest.approx(norm, rel=2.0**-23)
    assert reference_norm(mine, norm_type) <= max_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip_value", [0.0, 0.125, 64.0])
def test_clip_grad_value(dtype, clip_value):
    (mine, nothing), (theirs, _) = (
        clipped(module.clip_grad_value, leaves(dtype), clip_value) for module in (ours, peer)
    )
    assert nothing is None
    for my_leaf, their_leaf in zip(mine, theirs, strict=True):
        assert np.array_equal(my_leaf, their_leaf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_norm(dtype):
    ps = list(map(parameter, leaves(dtype)))
    before = [p.grad for p in ps]
    norm = ours.grad_norm(ps)
    assert (type(norm), norm.device) == (lucid.Tensor, "gpu")
    assert norm.item() == pytest.approx(reference_norm(leaves(dtype)), rel=2.0**-23)
    assert [p.grad for p in ps] == before


def test_what_is_not_clipped_is_the_same_array():
    one = parameter(np.array([3.0, 4.0], np.float32))
    grad = one.grad
    assert ours.clip_grad_norm([one], 5.0).item() == 5.0
    assert one.grad is grad
    ours.clip_grad_norm([one], 1.0, eps=0.0)
    assert_just_below(np.array(one.grad), [0.6, 0.8], "float32")
    assert grad.tolist() == [3.0, 4.0]


def test_a_shared_gradient_counts_and_is_replaced_for_each_parameter():
    grad = mx.array([3.0, 4.0])
    ps = [parameter([0.0, 0.0]) for _ in range(2)]
    for p in ps:
        p.grad = grad
    assert ours.clip_grad_norm([*ps, ps[0]], 1.0, eps=0.0).item() == pytest.approx(50**0.5, rel=1e-6)
    for p in ps:
        assert np.array(p.grad).tolist() == pytest.approx([3 / 50**0.5, 4 / 50**0.5], rel=1e-6)
    assert grad.tolist() == [3.0, 4.0]


def test_tensors_as_gradients_and_both_devices_together():
    on_gpu, on_cpu, held = parameter([3.0]), nn.Parameter(np.zeros(1)), parameter([0.0])
    on_cpu.grad = np.array([4.0])
    held.grad = lucid.Tensor([12.0], device="gpu")
    inner = held.grad
    assert ours.clip_grad_norm([on_gpu, on_cpu, held], 6.5, eps=0.0).item() == 13.0
    assert held.grad is inner
    assert type(inner.data) is mx.array
    found = [np.array(on_gpu.grad).item(), on_cpu.grad.item(), inner.item()]
    assert found == pytest.approx([1.5, 2.0, 6.0], rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_seen_everywhere(bad):
    arrays, norm = clipped(ours.clip_grad_norm, [np.array([bad, 1.0], np.float32), np.float32([2.0])], 1.0)
    assert not math.isfinite(norm.item())
    assert all(np.isnan(x).all() for x in arrays)


def test_other_calls_clip_arrays_of_mlx_too():
    one = parameter([3.0, 4.0])
    assert float(gradclip.clip_grad_norm_([one], 1.0)) == 5.0
    assert type(one.grad) is mx.array
    np.testing.assert_allclose(np.array(one.grad), [0.6, 0.8], rtol=1e-5)


def test_training_on_the_device():
    model = nn.Linear(3, 2).to("gpu")
    x = lucid.Tensor(np.ones((4, 3), np.float32)).to("gpu")
    (model(x) ** 2).sum().backward()
    expected = reference_norm([np.array(p.grad) for p in model.parameters()])
    assert ours.clip_grad_norm(model.parameters(), 0.01).item() == pytest.approx(expected, rel=1e-6)
    after = reference_norm([np.array(p.grad) for p in model.parameters()])
    assert 0.0099 < after <= 0.01
