"""Multi-tensor operations within `torch.compile`: one graph, few nodes, the values of calls that are not compiled."""

import math

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import gradclip
from gradclip.integrations.torch import clip_grads_with_norm_
from on_a_device import DEVICE, SHAPES
from rational import at_most

CALLS = {
    "clip_grad_norm_": lambda params: gradclip.clip_grad_norm_(params, 1.0),
    "drop": lambda params: gradclip.clip_grad_norm_(params, 1.0, nonfinite="drop"),
    "zero": lambda params: gradclip.clip_grad_norm_(params, 1.0, nonfinite="zero"),
    "grad_norm": gradclip.grad_norm,
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1.0, 20.0),
    "clip_grad_value_": lambda params: gradclip.clip_grad_value_(params, 0.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_step_is_one_graph(name):
    def clipped(call):
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        rng = np.random.default_rng(3)
        for param in params:
            param.grad = torch.tensor(rng.standard_normal(param.shape), dtype=torch.float32)
        call(params)
        return [param.grad for param in params]

    torch.compiler.reset()
    nodes = []

    def backend(graph, _):
        nodes.append(len([node for node in graph.graph.nodes if node.op != "placeholder"]))
        return graph.forward

    found = clipped(torch.compile(CALLS[name], backend=backend, fullgraph=True))
    with DEVICE.mode():
        expected = clipped(CALLS[name])
    assert len(nodes) == 1
    assert nodes[0] <= 60 + (len(SHAPES) if name in ("drop", "zero") else 0), nodes
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


def test_lengths_may_be_dynamic_in_compiled_code():
    torch.compiler.reset()
    call = torch.compile(
        lambda x: gradclip.clip_by_global_norm([x], 1.0), backend="eager", fullgraph=True, dynamic=True
    )
    for size in (3, 5):
        clipped, norm = call(torch.ones(size))
        assert float(norm) == pytest.approx(math.sqrt(size))
        assert at_most([x.double().numpy() for x in clipped], 2, 1.0)


PARAMETER = torch.nn.Parameter(torch.zeros(5, 6))


def in_place(call):
    def clipped(x, threshold):
        PARAMETER.grad = x.clone()
        call([PARAMETER], threshold)
        return PARAMETER.grad

    return clipped


CHANGING = {
    "clip_by_global_norm": lambda x, threshold: gradclip.clip_by_global_norm([x], threshold)[0][0],
    "clip_by_layer_norm": lambda x, threshold: gradclip.clip_by_layer_norm([x, x], threshold)[0][1],
    "clip_grad_norm_": in_place(gradclip.clip_grad_norm_),
    "clip_grads_with_norm_": in_place(lambda p, threshold: clip_grads_with_norm_(p, threshold, math.sqrt(9455))),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_threshold_that_changes_is_compiled_twice(name):
    """Once for the first value, once for all others. The compiler makes operations on tensors from those on numbers."""
    torch.compiler.reset()
    counts, x = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), torch.arange(1.0, 31.0).reshape(5, 6)
    call, made = torch.compile(CHANGING[name], backend=counts), []
    for step in range(1, 13):
        threshold = 0.37 * step
        found = call(x, threshold)
        assert at_most([found.double().numpy()], 2, threshold)
        assert float(found.double().norm()) >= threshold * (1 - 1e-5)
        made.append(counts.frame_count)
    assert made[1:] == [made[1]] * 11


def test_a_tensor_of_one_element_shares_no_compiled_multiplication():
    """PyTorch's compiler for GPUs may compute the coefficient where others of the same kernel do not see it."""
    shared = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if "_foreach_mul" in str(node.target):
                shared.append([list(x.meta["example_value"].shape) for x in node.args[0]])
        return graph.forward

    torch.compiler.reset()
    call = torch.compile(gradclip.clip_by_global_norm, backend=backend, fullgraph=True)
    with FakeTensorMode():
        tree = [torch.ones(shape, device="cuda") for shape in [(7, 4), (), (3,), (1, 1)]]
        clipped, _ = call(tree, torch.ones((), dtype=torch.float64, device="cuda"))
    assert sorted(shared) == [[[]], [[1, 1]], [[7, 4], [3]]]
    assert [x.shape for x in clipped] == [x.shape for x in tree]
