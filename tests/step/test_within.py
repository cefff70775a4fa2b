"""What a folded step measures and divides: gradients in any layout, norms beyond float32, copies of optimizers."""

import copy
import math
import pickle

import pytest
import torch

from gradclip import AdaptiveThreshold, QuantileRule, clip_at_step

MAKE = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}

# Layouts: each makes a gradient of a shape, and the memory around it.


def expanded(shape):
    memory = torch.full((1, 40), 30.0)
    return memory[:, 3:4].expand(shape), memory


def expanded_rows(shape):
    memory = torch.arange(1.0, 1.0 + 2 * shape[1]) * 10
    return memory[: shape[1]].expand(shape), memory


def transposed(shape):
    memory = torch.arange(1.0, 1.0 + math.prod(shape)) * 10
    return memory.reshape(shape[::-1]).t(), memory


def strided(shape):
    memory = torch.arange(1.0, 1.0 + 2 * math.prod(shape)) * 10
    return memory.reshape(shape[0], 2 * shape[1])[:, ::2], memory


@pytest.mark.parametrize("max_norm", [1.0, 1e9])
@pytest.mark.parametrize("layout", [expanded, expanded_rows, transposed, strided])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_gradients_that_lie_otherwise_than_their_parameters(make, layout, max_norm):
    """Kernels go through the memory of both side by side: what they would divide twice, or beside a gradient."""
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 7)) for _ in range(2))
    folded, plain = make([ours]), make([theirs])
    clipping = clip_at_step(folded, max_norm, fused=True)
    for _ in range(2):
        ours.grad, memory = layout((5, 7))
        before = memory.clone()
        norm = torch.linalg.vector_norm(ours.grad)
        theirs.grad = (ours.grad * torch.clamp(max_norm / norm, max=1.0)).contiguous()
        folded.step()
        plain.step()
        torch.testing.assert_close(clipping.norm, norm)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.equal(memory, before)


def test_gradients_that_lie_like_their_parameters_stay_where_they_are():
    weight = torch.nn.Parameter(torch.ones(7, 5).t())
    weight.grad = grad = torch.ones(7, 5).t()
    clip_at_step(optimizer := torch.optim.SGD([weight], lr=1.0, fused=True), 1.0, fused=True)
    optimizer.step()
    assert weight.grad is grad
    torch.testing.assert_close(weight.detach(), 1.0 - torch.full((5, 7), 35**-0.5))


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e38), (torch.float64, 1e300), (torch.bfloat16, 3e38)])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_spike_beyond_float32_is_skipped(make, dtype, value, nonfinite):
    weight = torch.nn.Parameter(torch.ones(9, dtype=dtype))
    optimizer = make([weight])
    clip_at_step(
        optimizer,
        AdaptiveThreshold(QuantileRule(factor=2.0, window=4), skip_above=4.0),
        nonfinite=nonfinite,
        fused=True,
    )
    for _ in range(2):
        weight.grad = torch.ones(9, dtype=dtype)
        optimizer.step()
    before = weight.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    weight.grad = torch.full((9,), value, dtype=dtype)
    optimizer.step()
    assert torch.equal(weight, before[0])
    torch.testing.assert_close(optimizer.state_dict()["state"], before[1], rtol=0, atol=0)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("folded_before", [False, True])
def test_copies_of_fused_optimizers(make, copied, folded_before):
    original = make([torch.nn.Parameter(torch.ones(2))])
    if folded_before:
        clip_at_step(original, 1.0, fused=True)
    ours, theirs = copied(original), copied(original)
    clipping = clip_at_step(ours, 1.0, fused=True)
    for optimizer, grad in ((ours, [3.0, 4.0]), (theirs, [0.6, 0.8])):
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.tensor(grad)
        optimizer.step()
    torch.testing.assert_close(ours.param_groups[0]["params"], theirs.param_groups[0]["params"])
    assert clipping.norm == 5.0
    clipping.remove()
    assert vars(ours).keys() == vars(theirs).keys()


def test_a_copy_under_a_scaler_divides_once():
    optimizer = copy.deepcopy(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, fused=True))
    (weight,) = optimizer.param_groups[0]["params"]
    clip_at_step(optimizer, 1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight @ torch.tensor([3.0, 4.0])).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
