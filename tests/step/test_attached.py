"""Every handle ends at the end of `with`, and says what it does."""

import copy
import pickle

import pytest
import torch

import gradclip
from engines_alike import Engine, Optimizer
from gradclip.integrations.torch import clip_in_backward


def sgd(weight=None, **settings):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2)) if weight is None else weight], lr=1.0, **settings)


HANDLES = {
    "before the step": (
        lambda: gradclip.clip_at_step(sgd(), 1.0),
        "StepClipping(SGD, max_norm=1.0, scope='global', fused=False, 0 steps)",
    ),
    "within the step": (
        lambda: gradclip.clip_at_step(sgd(fused=True), 0.5),
        "StepClipping(SGD, max_norm=0.5, scope='global', fused=True, 0 steps)",
    ),
    "DeepSpeed": (
        lambda: gradclip.clip_at_step(Engine(), 2.0),
        "EngineClipping(Engine, max_norm=2.0, scope='global', 0 steps)",
    ),
    "Megatron": (
        lambda: gradclip.clip_at_step(Optimizer(), 2.0),
        "EngineClipping(Optimizer, max_norm=2.0, scope='global', 0 steps)",
    ),
    "in the backward pass": (
        lambda: clip_in_backward([torch.nn.Parameter(torch.zeros(2))], 1.5),
        "ClippedInBackward(1 parameter, max_norm=1.5, scope='layer', 0 passes)",
    ),
    "guard": (lambda: gradclip.guard(sgd(), 1.0), "StepGuard(SGD, max_norm=1.0, 0 steps, 0 looks, no mistake)"),
}
EACH = pytest.mark.parametrize(("make", "said"), HANDLES.values(), ids=HANDLES)


@EACH
def test_it_says_what_it_does(make, said):
    handle = make()
    assert repr(handle) == said
    handle.remove()
    handle.remove()
    assert repr(handle) == f"{said[:-1]}, removed)"


@EACH
def test_with_removes_it(make, said):
    with make() as handle:
        assert repr(handle) == said
    assert repr(handle).endswith(", removed)")
    with pytest.raises(ZeroDivisionError), make() as handle:
        1 / 0
    assert repr(handle).endswith(", removed)")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@EACH
def test_a_handle_is_not_copied(make, said, copied):
    """A copy would look alive and clip nothing."""
    with (
        make() as handle,
        pytest.raises(TypeError, match=r"cannot be copied or saved: .* Attach a new one to the copy"),
    ):
        copied(handle)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_with_a_handle_and_a_guard_is_copied_without_them(fused):
    optimizer = sgd(fused=fused)
    with gradclip.clip_at_step(optimizer, 1.0) as clipping, gradclip.guard(optimizer, clipping) as guard:
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            (weight,) = other.param_groups[0]["params"]
            weight.grad = torch.tensor([3.0, 4.0])
            other.step()
            assert weight.tolist() == [-3.0, -4.0]
        assert (clipping.steps, guard.steps) == (0, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_after_with_steps_are_as_before(fused):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = sgd(weight, fused=fused)
    before = set(vars(optimizer))
    with gradclip.clip_at_step(optimizer, 1.0) as clipping:
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    assert (clipping.norm, clipping.steps) == (5.0, 1)
    assert ", 1 step, removed)" in repr(clipping)
    assert set(vars(optimizer)) == before
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([-3.6, -4.8])


def test_after_with_backward_passes_are_as_before():
    weight = torch.nn.Parameter(torch.zeros(2))
    with clip_in_backward([weight], 1.0) as clipping:
        (weight @ torch.tensor([3.0, 4.0])).backward()
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])
    assert "1 pass, removed)" in repr(clipping)
    weight.grad = None
    (weight @ torch.tensor([3.0, 4.0])).backward()
    assert weight.grad.tolist() == [3.0, 4.0]


def test_a_long_threshold_is_cut():
    clipping = gradclip.clip_at_step(sgd(), gradclip.AdaptiveThreshold(gradclip.QuantileRule(factor=2.0, window=64)))
    assert repr(clipping).startswith("StepClipping(SGD, max_norm=AdaptiveThreshold(QuantileRule(")
    assert len(repr(clipping)) < 160
