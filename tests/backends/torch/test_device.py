"""Tensors on a device: no call waits for it, and nothing is copied to it or from it."""

from types import SimpleNamespace

import pytest
import torch

import gradclip
from frameworks import ALL, by_name


def holders(framework, *grads):
    return [SimpleNamespace(grad=None if grad is None else framework.array(*grad)) for grad in grads]


@pytest.mark.parametrize("framework", [f for f in ALL if f.name == "torch-device"], ids=by_name)
def test_no_waiting_for_a_device(framework):
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoLook(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func), "a look at a value waits for the device"
            assert "nonzero" not in str(func)
            return func(*args, **(kwargs or {}))

    parameters = holders(framework, ([3.0, 4.0],), ([12.0], "bfloat16"), ([1e300], "float64"))
    with framework.mode(), NoLook():
        gradclip.clip_grad_norm_(parameters, 1.0)
        gradclip.clip_grad_norm_(parameters, 1.0, nonfinite="drop")
        gradclip.clip_grad_value_(parameters, 1.0)
        with pytest.raises(AssertionError, match="a look at a value"):
            gradclip.clip_grad_norm_(parameters, 1.0, nonfinite="raise")


def test_nothing_is_copied_between_host_and_device(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class OneDevice(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            devices = {t.device.type for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
            assert devices <= {"meta"}, f"{func} reads from the host"
            return func(*args, **(kwargs or {}))

    parameters = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        parameters.append(torch.nn.Parameter(torch.empty(3, device="meta", dtype=dtype)))
        parameters[-1].grad = torch.empty(3, device="meta", dtype=dtype)
    monkeypatch.delattr(torch, "as_tensor")  # it copies a number to the device, unseen by the dispatcher
    with OneDevice():
        for ord, policy in ((2, "propagate"), (3, "drop"), ("-inf", "zero")):
            assert gradclip.clip_grad_norm_(parameters, 1.0, ord, nonfinite=policy).device.type == "meta"
        gradclip.clip_grad_value_(parameters[:3], 1.0)
        with pytest.raises(AssertionError, match="reads from the host"):
            parameters[0].grad.add_(torch.ones(3))
