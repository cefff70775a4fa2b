"""Tensors that lie in any order, or without memory: zeros known to be zeros, freed storage, and mere shapes."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fresh_process
import gradclip

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def holder(tensor):
    return SimpleNamespace(grad=tensor)


def clipped_in_place(tensor, *others):
    made = holder(tensor)
    norm = gradclip.clip_grad_norm_([made, *map(holder, others)], 0.5)
    return made.grad, norm


def clamped_in_place(tensor, *others):
    made = holder(tensor)
    gradclip.clip_grad_value_([made, *map(holder, others)], 0.5)
    return made.grad


CALLS = {
    "global_norm": lambda *tensors: gradclip.global_norm(tensors),
    "layer_norms": lambda *tensors: gradclip.layer_norms(tensors),
    "clip_by_global_norm": lambda *tensors: gradclip.clip_by_global_norm(tensors, 0.5),
    "clip_by_layer_norm": lambda *tensors: gradclip.clip_by_layer_norm(tensors, 0.5),
    "clip_by_value": lambda *tensors: gradclip.clip_by_value(tensors, 0.5),
    "per_example_clip": lambda *tensors: gradclip.per_example_clip(tensors, 0.5),
    "partial_norm": lambda *tensors: gradclip.partial_norm(tensors),
    "grad_norm": lambda *tensors: gradclip.grad_norm(list(map(holder, tensors)), "inf"),
    "clip_grad_norm_": clipped_in_place,
    "clip_grad_value_": clamped_in_place,
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def zeros_of(dtype):
    zeros = torch._efficientzerotensor
    return [zeros(3, dtype=dtype), zeros((2, 3), dtype=dtype).T[::2], zeros((2, 2), dtype=dtype).conj()]


def freed(shape, dtype=torch.float32):
    """Return tensors whose storage holds nothing: all of it, a strided part, and one that begins further on."""
    whole = torch.ones(shape, dtype=dtype)
    found = [whole, whole[::2], whole[2:]]
    whole.untyped_storage().resize_(0)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_without_memory_are_zeros(dtype):
    for zero in zeros_of(dtype):
        given = torch.full((2,), 3.0)
        (clipped, other), norm = gradclip.clip_by_global_norm([zero, given], 0.5)
        assert float(norm) == pytest.approx(18**0.5, rel=1e-7)
        assert torch.equal(clipped, torch.zeros(zero.shape, dtype=dtype))
        assert other.tolist() == pytest.approx([8**-0.5] * 2, rel=1e-6)
        grad, norm = clipped_in_place(zero, given)
        assert float(norm) == pytest.approx(18**0.5, rel=1e-7)
        assert torch.equal(grad, torch.zeros(zero.shape, dtype=dtype))
        summed, info = gradclip.per_example_clip(zero, 0.5)
        assert not summed.any()
        assert not info.norms.any()
        assert float(gradclip.grad_norm([holder(zero)], "inf")) == gradclip.partial_norm(zero).norm == 0.0


def test_zeros_without_memory_become_nan_with_the_others():
    grad, norm = clipped_in_place(torch._efficientzerotensor(3), torch.tensor([torch.nan]))
    assert norm.isnan()
    assert grad.isnan().all()


def test_zeros_without_memory_stay_where_nothing_is_clipped():
    zero = torch._efficientzerotensor(3)
    assert clipped_in_place(zero)[0] is zero


@pytest.mark.after_error
@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_freed_storage_is_refused(call, dtype):
    for tensor in freed(6, dtype):
        others = torch.full((tensor.shape[0],), 3.0)
        with pytest.raises((ValueError, TypeError), match="has no memory behind it"):
            call(others, tensor)
        assert others.eq(3.0).all()


def test_the_error_names_the_gradient():
    with pytest.raises(ValueError, match=r"parameters\[1\]\.grad, of shape \(3,\), has no memory behind it"):
        gradclip.clip_grad_norm_([holder(torch.ones(1)), holder(freed(6)[1])], 1.0)


def test_freed_values_of_a_sparse_tensor_are_refused():
    sparse = torch.ones(6).to_sparse().coalesce()
    sparse._values().untyped_storage().resize_(0)
    for call in (CALLS["global_norm"], CALLS["clip_by_global_norm"], CALLS["clip_grad_norm_"]):
        with pytest.raises(ValueError, match="has no memory behind it"):
            call(sparse)


@pytest.mark.parametrize("make", [lambda: torch.ones(3, device="meta"), lambda: torch.ones(3)], ids=["meta", "fake"])
def test_tensors_that_are_only_shapes_give_shapes(make):
    with FakeTensorMode():
        tensor = make()
        (clipped,), norm = gradclip.clip_by_global_norm([tensor], 0.5)
        assert (clipped.shape, clipped.device) == (tensor.shape, tensor.device)
        assert (norm.shape, norm.device) == ((), tensor.device)
        grad, norm = clipped_in_place(tensor)
        assert grad is tensor
        assert norm.device == tensor.device
        assert gradclip.per_example_clip([tensor], 0.5)[0][0].shape == ()
    meta = torch.ones(3, device="meta")
    assert gradclip.clip_by_global_norm([meta], 0.5)[1].device == meta.device
    assert clipped_in_place(meta)[0] is meta


LYING = {
    "transposed": lambda: torch.ones(5, 3).t(),
    "permuted": lambda: torch.ones(4, 3, 2).permute(2, 0, 1),
    "every other column": lambda: torch.ones(3, 8)[:, ::2],
    "expanded": lambda: torch.ones(4).expand(3, 4),
}


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_clips_gradients_in_any_memory_order():
    def gradients():
        params = [torch.nn.Parameter(torch.zeros_like(make())) for make in LYING.values()]
        for p, make in zip(params, LYING.values(), strict=True):
            p.grad = make()
        return params

    torch.compiler.reset()
    params, clipped = gradients(), gradients()
    lying = [p.grad for p in clipped]
    norm = torch.compile(partial(gradclip.clip_grad_norm_, max_norm=1.0), backend="aot_eager", fullgraph=True)(clipped)
    assert float(norm) == pytest.approx(math.sqrt(sum(p.grad.numel() for p in params)), rel=1e-6)
    gradclip.clip_grad_norm_(params, 1.0)
    for p, q in zip(params, clipped, strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    assert [q.grad is old for q, old in zip(clipped, lying, strict=True)] == [True, True, True, False]
    assert torch.equal(lying[-1], torch.ones(3, 4))


WITHOUT_COMPILING = """
    import sys, torch, gradclip
    weights = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    loss = sum((weight * weight).sum() for weight in weights)
    loss.backward()
    gradclip.clip_grad_norm_(weights, 1.0, monitor=gradclip.Monitor())
    gradclip.clip_grad_layer_norm_(weights, gradclip.AdaptiveThreshold())
    gradclip.clip_by_global_norm([weights[0] * 2.0], 1.0)[0][0].sum().backward()
    gradclip.per_example_clip([weight.grad for weight in weights], 1.0)
    print([name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules])
    """


def test_calls_that_are_not_compiled_load_no_compiler(tmp_path):
    # It takes seconds, and its Triton aborts the process if TensorFlow is there already.
    assert fresh_process.run(WITHOUT_COMPILING, tmp_path) == "[]"
