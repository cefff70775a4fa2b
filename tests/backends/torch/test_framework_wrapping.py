"""Gradients of types that users derive from tensors: those that only wrap a tensor are clipped as that tensor."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import gradclip
from gradclip import clip_at_step
from gradclip._src.backends.torch.framework import Wrapped
from gradclip.integrations.torch import clip_in_backward


class Mine(torch.Tensor):
    """A type that adds something of its own."""

    unit = "m"

    def told(self):
        return f"{self.unit}: {self.tolist()}"


class Deeper(Mine):
    def __repr__(self):
        return "deeper"


class Halved(torch.Tensor):
    """A type whose numbers are half of those in memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("its operations are its own")


class Doubles(torch.Tensor):
    def abs(self):
        return 2 * super().abs()


def parameters(kind, *values, dtype=torch.float32):
    found = [torch.nn.Parameter(torch.zeros(len(one), dtype=dtype)) for one in values]
    for parameter, one in zip(found, values, strict=True):
        parameter.grad = torch.tensor(one, dtype=dtype).as_subclass(kind)
    return found


VALUES = ([3.0, 4.0], [12.0], [0.0, 84.0])
CALLS = {
    "norm": lambda p: gradclip.clip_grad_norm_(p, 5.0),
    "layers": lambda p: gradclip.clip_grad_layer_norm_(p, 5.0),
    "units": lambda p: gradclip.clip_grad_unit_norm_(p, 5.0),
    "values": lambda p: gradclip.clip_grad_value_(p, 3.5),
    "groups": lambda p: gradclip.clip_grad_norm_([{"params": p[:1], "max_norm": 2.0}, {"params": p[1:]}], 5.0),
    "adaptive": lambda p: gradclip.adaptive_grad_clip_(p, 0.1),
    "measure": gradclip.grad_norm,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Mine, Deeper])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_they_are_clipped_to_the_bit_as_tensors_and_keep_their_type(call, kind, dtype):
    given, plain = parameters(kind, *VALUES, dtype=dtype), parameters(torch.Tensor, *VALUES, dtype=dtype)
    before = [p.grad for p in given]
    found, expected = call(given), call(plain)
    assert str(found) == str(expected)
    for own, p, other in zip(before, given, plain, strict=True):
        assert p.grad is own
        assert type(p.grad) is kind
        assert p.grad.tolist() == other.grad.tolist()


def test_one_that_cannot_be_written_is_replaced_by_one_of_its_type():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.tensor([3.0, 4.0]).as_subclass(Mine).expand(2, 2)
    assert gradclip.clip_grad_norm_([parameter], 1.0).item() == pytest.approx(math.sqrt(50.0))
    assert type(parameter.grad) is Mine
    torch.testing.assert_close(parameter.grad.as_subclass(torch.Tensor), torch.tensor([[3.0, 4.0]] * 2) / math.sqrt(50))


def test_memory_that_they_share_is_scaled_once():
    one, other, third = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    one.grad = torch.tensor([3.0, 4.0]).as_subclass(Mine)
    other.grad, third.grad = one.grad[:], one.grad.as_subclass(torch.Tensor)
    assert gradclip.clip_grad_norm_([one, other, third], 1.0).item() == pytest.approx(5 * math.sqrt(3))
    assert one.grad.tolist() == other.grad.tolist() == pytest.approx([0.6 / math.sqrt(3), 0.8 / math.sqrt(3)])
    assert {type(one.grad), type(other.grad)} == {Mine}


def test_a_backward_pass_that_needs_the_old_values_fails():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0]).as_subclass(Mine)
    x = torch.ones(2, requires_grad=True)
    loss = (parameter.grad * x).sum()
    gradclip.clip_grad_norm_([parameter], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_clip_them():
    (parameter,) = parameters(Mine, [3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    clipping = clip_at_step(optimizer, 1.0, fused=True)
    optimizer.step()
    assert clipping.norm.item() == 5.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.6, -0.8]))


def test_backward_passes_clip_them():
    parameter = torch.nn.Parameter(torch.zeros(2))
    clip_in_backward([parameter], 1.0)
    parameter.backward(torch.tensor([3.0, 4.0]).as_subclass(Mine))
    torch.testing.assert_close(parameter.grad.as_subclass(torch.Tensor), torch.tensor([0.6, 0.8]))


def test_types_with_operations_of_their_own_are_not_unwrapped():
    for kind in (Halved, Doubles):
        assert Wrapped.of([torch.ones(2), torch.ones(2).as_subclass(kind)]) is None
    assert Wrapped.of([torch.ones(2)]) is None
    mixed = [torch.ones(2).as_subclass(Mine), torch.ones(2).as_subclass(Doubles), torch.ones(2)]
    found = Wrapped.of(mixed)
    assert [type(one) for one in found.locals] == [torch.Tensor, Doubles, torch.Tensor]
    assert found.whole(found.locals) is mixed
    new = torch.zeros(2)
    assert [type(one) for one in found.chosen([0, 2]).whole([new, new])] == [Mine, torch.Tensor]


class Counting(TorchFunctionMode):
    """Counts the operations on tensors of one type."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += Mine in types
        return func(*args, **(kwargs or {}))


def test_few_operations_see_the_type():
    given = parameters(Mine, *([3.0, 4.0] for _ in range(20)))
    with Counting() as counting:
        gradclip.clip_grad_norm_(given, 1.0)
    assert counting.count <= 2 * len(given)
    assert float(gradclip.grad_norm(given)) == pytest.approx(1.0)
