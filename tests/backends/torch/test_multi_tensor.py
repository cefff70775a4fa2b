"""Multi-tensor operations: few of them, on the checks of a real device, with the values that other paths give."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip
from gradclip.integrations.torch import clip_grad_norm_ as torch_clip_grad_norm_
from gradclip.integrations.torch import clip_grads_with_norm_, get_total_norm
from on_a_device import DEVICE, DTYPES, SHAPES
from rational import at_most, power_of_norm

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COUNTED = [(400, 300), (300,), (300, 70), ()] * 5


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("counts", BENCHMARKS / "counts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOST = {"float32": (16, 2.1), "bfloat16": (22, 3.1), "float16": (20, 2.1), "float64": (48, 5.0)}
# What each call may take more than `clip_grad_norm_`: operations, operations a tensor, and the gradients' bytes.
TENSOR = "clip_grad_norm_, a tensor for max_norm"
MORE = {
    TENSOR: (12, 0, 0),
    "clip_grad_layer_norm_": (2, 0, 0),
    "clip_grad_norm_, drop": (5, 0, 1.05),
    "clip_grad_norm_, zero": (1, 1, 1.05),
    "clip_by_global_norm": (1, 0, 1.05),
    "clip_by_layer_norm": (1, 0, 1.05),
    "grad_norm": (0, 0, -0.9),
    "get_total_norm": (0, 0, -0.9),
    "layer_norms": (0, 0, -0.9),
    "clip_grad_value_": (0, 0, 0),
    "clip_by_value": (0, 0, 1.05),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_operations_bytes_and_no_waits_on_cuda(counts, dtype):
    name = str(dtype).removeprefix("torch.")
    with FakeTensorMode():
        grads = [torch.empty(shape, dtype=dtype, device="cuda") for shape in COUNTED]
        found = {call: counts.counted(run, grads) for call, run in counts.calls(grads).items()}
    # Where products of float16 below the normal range may add up to more than the threshold, they are moved a step.
    stepped = {"clip_grad_norm_, ord=1", "clip_grads_with_norm_", TENSOR} if dtype is torch.float16 else set()
    for call, (operations, moved, _, waits) in found.items():
        more, each, more_bytes = MORE.get(call, (0, 0, 0))
        halves = (
            1.05
            if dtype in (torch.float16, torch.bfloat16) and call in ("clip_by_global_norm", "clip_by_layer_norm")
            else 0
        )
        steps, step_bytes = (7, 6) if call in stepped else (0, 0)
        assert waits == 0, call
        assert operations <= MOST[name][0] + more + each * len(COUNTED) + steps, call
        assert moved <= MOST[name][1] + more_bytes + halves + step_bytes, call
    assert found[counts.PEER][:2] == [8, pytest.approx(2.0, abs=0.01)]


def leaves_of(rng, dtype, scale=1.0):
    values = [np.float64(rng.standard_normal(shape) * scale) for shape in SHAPES]
    return [torch.tensor(x).to(dtype) for x in values]


def clip(leaves, max_norm, ord=2, **options):
    with DEVICE.mode():
        held = [SimpleNamespace(grad=x.clone()) for x in leaves]
        norm = gradclip.clip_grad_norm_(held, max_norm, ord, **options)
        return [one.grad for one in held], norm


def exact(leaves):
    return [x.double().numpy() for x in leaves]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ord", [1, 2, math.inf])
@pytest.mark.parametrize("layers", [False, True])
def test_in_place_and_functional_calls_agree_and_hold_the_bound(dtype, ord, layers):
    leaves = leaves_of(np.random.default_rng(0), dtype)
    with DEVICE.mode():
        if layers:
            new, norms = gradclip.clip_by_layer_norm(leaves, 0.5, ord=ord)
            for x, y, norm in zip(leaves, new, norms, strict=True):
                assert at_most(exact([y]), ord, 0.5)
                assert norm == gradclip.global_norm([x], ord)
            return
        new, norm = gradclip.clip_by_global_norm(leaves, 5.0, ord=ord)
    written, same = clip(leaves, 5.0, ord)
    assert norm == same
    assert all(x.equal(y) and x.shape == z.shape for x, y, z in zip(new, written, leaves, strict=True))
    assert at_most(exact(new), ord, 5.0)
    if ord == 2:
        assert power_of_norm(exact(new), 2) >= (5.0 * (0.99 if dtype.itemsize == 2 else 1 - 1e-6)) ** 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_clipped_keeps_its_bits(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    leaves = [
        torch.tensor([tiny / 4, -0.0, 1.0, -tiny], dtype=dtype),
        torch.tensor(0.25, dtype=dtype),
        torch.empty(0, dtype=dtype),
    ]
    written, _ = clip(leaves, 2.0)
    with DEVICE.mode():
        new, _ = gradclip.clip_by_global_norm(leaves, 2.0)
        each, _ = gradclip.clip_by_layer_norm(leaves[:2], 2.0)
    bits = torch.int64 if dtype is torch.float64 else torch.int32 if dtype is torch.float32 else torch.int16
    for found in (written, new, each):
        assert all(x.view(bits).equal(y.view(bits)) for x, y in zip(found, leaves, strict=False))


def test_dtypes_mixed_and_thresholds_that_differ():
    rng = np.random.default_rng(1)
    leaves = [x for dtype in DTYPES for x in leaves_of(rng, dtype)[:3]]
    written, _ = clip(leaves, 3.0)
    assert at_most(exact(written), 2, 3.0)
    assert power_of_norm(exact(written), 2) >= (3.0 * 0.99) ** 2
    thresholds = [0.5 + i for i in range(len(leaves))]
    with DEVICE.mode():
        new, _ = gradclip.clip_by_layer_norm(leaves, thresholds)
    assert all(at_most(exact([y]), 2, c) for y, c in zip(new, thresholds, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_policies(bad, dtype):
    leaves = [torch.tensor([3.0, bad, 4.0], dtype=dtype), torch.tensor(12.0, dtype=dtype)]
    spoiled, norm = clip(leaves, 6.5)
    assert not norm.isfinite()
    assert all(x.isnan().all() for x in spoiled)
    skipped, _ = clip(leaves, 6.5, nonfinite="drop")
    assert not any(x.any() for x in skipped)
    zeroed, norm = clip(leaves, 6.5, nonfinite="zero")
    assert norm == 13.0
    assert zeroed[0][1] == 0
    assert float(zeroed[1]) == pytest.approx(6.0, rel=2.0**-7)
    with DEVICE.mode():
        new, _ = gradclip.clip_by_global_norm(leaves, 6.5, nonfinite="zero")
        assert all(x.equal(y) for x, y in zip(new, zeroed, strict=True))
        assert not leaves[0].isfinite().all()
    with pytest.raises(FloatingPointError, match="1 of 2 leaves"):
        clip(leaves, 6.5, nonfinite="raise")


def test_float64_keeps_its_range():
    for scale in (1e200, 1e-200):
        leaves = [torch.tensor([3.0, 4.0], dtype=torch.float64) * scale]
        written, norm = clip(leaves, scale)
        assert float(norm) == pytest.approx(5 * scale, rel=1e-14)
        assert at_most(exact(written), 2, scale)
        assert float(written[0][1]) == pytest.approx(0.8 * scale, rel=1e-13)


def test_gradients_that_cannot_be_written_are_replaced():
    held = [SimpleNamespace(grad=torch.ones(1).expand(4)), SimpleNamespace(grad=torch.ones(5))]
    with DEVICE.mode():
        assert gradclip.clip_grad_norm_(held, 1.0) == 3.0
    assert at_most(exact([one.grad for one in held]), 2, 1.0)
    assert held[0].grad.tolist() == pytest.approx([1 / 3] * 4)


def test_values_are_clamped_to_what_their_dtype_holds():
    leaves = [torch.tensor([3.0, -math.nan, -math.inf, 0.1], dtype=dtype) for dtype in DTYPES]
    with DEVICE.mode():
        new = gradclip.clip_by_value(leaves, 1.1)
        held = [SimpleNamespace(grad=x.clone()) for x in leaves]
        gradclip.clip_grad_value_(held, 1.1)
    for x, y, one in zip(leaves, new, held, strict=True):
        assert one.grad.equal(y) or torch.equal(one.grad.nan_to_num(7), y.nan_to_num(7))
        limit = float(y[0])
        assert limit <= 1.1 < float(torch.nextafter(y[0], torch.tensor(2.0, dtype=x.dtype)))
        assert [y[1].isnan().item(), float(y[2]), float(y[3])] == [True, -limit, float(x[3])]


def test_a_known_norm():
    leaves = leaves_of(np.random.default_rng(2), torch.float32)
    with DEVICE.mode():
        norm = gradclip.global_norm(leaves)
        for given in (norm, float(norm)):
            held = [SimpleNamespace(grad=x.clone()) for x in leaves]
            clip_grads_with_norm_(held, 1.0, given)
            assert at_most(exact([one.grad for one in held]), 2, 1.0)


def test_layers_that_want_a_derivative_have_one():
    x = [torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([0.3, 0.4], requires_grad=True)]
    with DEVICE.mode():
        clipped, norms = gradclip.clip_by_layer_norm(x, 1.0)
    (clipped[0][0] + clipped[1][1] + norms[1]).backward()
    np.testing.assert_allclose(x[0].grad, [0.128, -0.096], rtol=1e-5)
    np.testing.assert_allclose(x[1].grad, [0.6, 1.8], rtol=1e-6)


def test_nothing_is_computed_for_tensors_without_values():
    leaves = [torch.empty(3, 4, dtype=dtype, device="meta") for dtype in DTYPES]
    clipped, norm = gradclip.clip_by_global_norm(leaves, 1.0)
    assert [(x.shape, x.dtype, x.device.type) for x in clipped] == [(x.shape, x.dtype, "meta") for x in leaves]
    assert (norm.dtype, norm.device.type) == (torch.float64, "meta")


def test_a_float64_norm_beyond_the_range_is_not_clipped_to_infinity_and_tiny_thresholds_hold():
    huge = [torch.full((2,), 1.7e308, dtype=torch.float64)]
    written, _ = clip(huge, math.inf)
    assert written[0].equal(huge[0])
    for exponent in range(-1074, -940, 7):
        for ord in (1, 2):
            leaves = [torch.tensor([5.0, 3.0, 2.0], dtype=torch.float64) * 2.0**exponent]
            written, _ = clip(leaves, 2.0 ** (exponent + 2), ord)
            assert at_most(exact(written), ord, 2.0 ** (exponent + 2))
    for large, small in ((1e120, 1e-155), (1e200, 1e-160)):
        written, _ = clip([torch.tensor([large], dtype=torch.float64)], small)
        assert float(written[0]) == pytest.approx(small, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_orders_below_1_hold_the_bound_too(dtype):
    rng = np.random.default_rng(5)
    for _ in range(100):
        leaves = [torch.tensor(rng.standard_normal(30) * 2.0 ** rng.integers(-14, 3)).to(dtype)]
        with DEVICE.mode():
            norm = float(get_total_norm(leaves, 0.5))
            parameter = torch.nn.Parameter(leaves[0].clone())
            parameter.grad = leaves[0].clone()
            torch_clip_grad_norm_(parameter, norm * 0.8, 0.5)
        root = sum(math.sqrt(abs(v)) for v in parameter.grad.double().tolist())
        assert root**2 <= norm * 0.8 * (1 + 1e-12)


def test_zeros_are_positive():
    for max_norm, options in ((0.0, {}), (1.0, {"nonfinite": "drop"})):
        leaves = [torch.tensor([3.0, math.nan if options else 4.0], dtype=dtype) for dtype in DTYPES[:3]]
        written, _ = clip(leaves, max_norm, **options)
        assert all(math.copysign(1, v) == 1 for x in written for v in x.tolist())


def test_the_host_never_reads_what_has_not_come_from_a_device():
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoRace(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            to_host = str((kwargs or {}).get("device")) == "cpu"
            assert not (to_host and (kwargs or {}).get("non_blocking")), "the host may read it too early"
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        for devices in (("cuda", "cpu"), ("cpu", "cuda")):
            held = [SimpleNamespace(grad=torch.empty(5, device=device)) for device in devices]
            with NoRace():
                gradclip.clip_grad_norm_(held, 1.0)
                gradclip.grad_norm(held)


def test_a_leaf_without_elements_is_a_layer_of_norm_zero():
    leaves = [torch.tensor([3.0, 4.0]), torch.empty(0), torch.tensor([0.5])]
    with DEVICE.mode():
        clipped, norms = gradclip.clip_by_layer_norm(leaves, [1.0, 1.0, 0.25])
    assert [float(norm) for norm in norms] == [5.0, 0.0, 0.5]
    assert [x.tolist() for x in clipped] == [pytest.approx([0.6, 0.8]), [], pytest.approx([0.25])]
