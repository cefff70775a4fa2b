"""A threshold that follows, within the steps of fused optimizers: spikes are really skipped."""

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
import gradclip._src.backends.torch.framework as torch_backend
from gradclip import AdaptiveThreshold, QuantileRule, clip_at_step

MAKE = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
RULE = QuantileRule(window=4)
NORMS = [1.0, 1.0, 3.0, 100.0, 1.5, 2.0]


def made(make):
    weight = torch.nn.Parameter(torch.zeros(2))
    return weight, make([weight])


def give(weight, norm):
    weight.grad = torch.tensor([0.6, 0.8]) * norm


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_steps_are_those_after_clipping(make):
    (ours, folded), (theirs, after) = made(make), made(make)
    one, other = AdaptiveThreshold(RULE), AdaptiveThreshold(RULE)
    clipping = clip_at_step(folded, one, fused=True)
    for norm in NORMS:
        give(ours, norm)
        give(theirs, norm)
        gradclip.clip_grad_norm_([theirs], other)
        folded.step()
        after.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert one.state_dict() == other.state_dict()
    assert clipping.max_norm is one
    assert one.num_clipped == 2


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_spike_leaves_parameters_moments_and_counts_as_they_are(make, hidden):
    (ours, folded), (theirs, plain) = made(make), made(make)
    max_norm = AdaptiveThreshold(QuantileRule(factor=2.0, window=4), skip_above=4.0)
    clip_at_step(folded, max_norm, nonfinite="skip", fused=True)
    with mock.patch.object(torch_backend, "in_host_memory", return_value=False) if hidden else mock.MagicMock():
        for norm in (1.0, 1.0, 100.0, 2.0, math.nan, 1.0):
            give(ours, norm)
            folded.step()
            if norm < 100.0:
                give(theirs, norm)
                plain.step()
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for name, value in plain.state[theirs].items():
        torch.testing.assert_close(folded.state[ours][name], value, rtol=1e-6, atol=1e-6)
    assert (max_norm.steps, max_norm.num_clipped, max_norm.num_skipped) == (6, 0, 2)
    assert {"grad_scale", "found_inf"}.isdisjoint(vars(folded))


def test_nothing_waits():
    class NoWaits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "waits"
            return func(*args, **(kwargs or {}))

    weight, optimizer = made(MAKE["AdamW"])
    clipping = clip_at_step(optimizer, AdaptiveThreshold(skip_above=4.0), nonfinite="skip", fused=True)
    with mock.patch.object(torch_backend, "in_host_memory", return_value=False):
        for norm in (1.0, 1.0, 100.0):
            give(weight, norm)
            # The step itself, of this fused optimizer on the CPU, is not asked.
            with NoWaits():
                clipping._begin(optimizer, (optimizer,), {})
                clipping._end(optimizer, (optimizer,), {})
    assert clipping.max_norm.num_skipped == 1


@pytest.mark.after_error
def test_a_failed_step_is_not_observed():
    weight, optimizer = made(MAKE["AdamW"])
    max_norm = AdaptiveThreshold()
    clip_at_step(optimizer, max_norm, nonfinite="raise", fused=True)
    give(weight, math.nan)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    give(weight, 1.0)
    with mock.patch("torch._fused_adamw_", side_effect=RuntimeError("broken")), pytest.raises(RuntimeError):
        optimizer.step()
    assert max_norm.steps == 0


def test_unscaled_norms_are_observed():
    weight, optimizer = made(MAKE["AdamW"])
    max_norm, scaler = AdaptiveThreshold(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    clip_at_step(optimizer, max_norm, fused=True)
    scaler.scale(torch.zeros(()))
    for norm in (1.0, 3.0, math.inf, 1.0):
        give(weight, norm * float(scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()
    assert max_norm.history.norms[:3].tolist() == pytest.approx([1.0, 3.0, 1.0])


def test_thresholds_stay_where_a_step_can_divide_by_them():
    weight, optimizer = made(MAKE["AdamW"])
    max_norm = AdaptiveThreshold()
    clip_at_step(optimizer, max_norm, fused=True)
    for norm in (1e-18, 1e-18, 1e32, 1.0):
        give(weight, norm)
        optimizer.step()
        assert torch.isfinite(weight).all()
    assert float(max_norm.max_norm) == 2.0**-50


def test_a_number_may_take_its_place():
    weight, optimizer = made(MAKE["momentum"])
    clipping = clip_at_step(optimizer, AdaptiveThreshold(), fused=True)
    clipping.max_norm = 1.0
    give(weight, 5.0)
    optimizer.step()
    assert torch.linalg.vector_norm(weight) <= 0.1


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e37), (torch.float64, 1e307)])
def test_finite_spikes_beyond_the_range_are_skipped(dtype, value):
    weight = torch.nn.Parameter(torch.zeros(500, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clipping = clip_at_step(optimizer, AdaptiveThreshold(skip_above=3.0), ord=1, fused=True)
    for scale in (1e3, value, 1e3):
        weight.grad = torch.full_like(weight, scale)
        optimizer.step()
    assert weight.detach().tolist() == [-2e3] * 500
    assert (clipping.max_norm.steps, clipping.max_norm.num_clipped, clipping.max_norm.num_skipped) == (3, 0, 1)
