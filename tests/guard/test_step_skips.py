"""Which steps count as skipped."""

import math

import pytest
import torch

import gradclip
from gradclip._src.guard.step import AT_FIRST, Skips
from gradclip._src.step.heard import ClipCall

WEIGHT = torch.nn.Parameter(torch.zeros(2))


def call(norm=1.0, nonfinite="propagate", max_norm=1.0, function="clip_grad_norm_"):
    return ClipCall(function, [WEIGHT], 1, 1, max_norm, torch.tensor(norm), 2.0, nonfinite)


def counted(*steps, device=None):
    """Return the number of skipped steps, and those in a row until now."""
    skips = Skips()
    for step in steps:
        if isinstance(step, ClipCall):
            skips.clipped(step)
            skips.passed(None, by_scaler=False)
        elif step == "scaler":
            skips.left_out()
        else:
            skips.passed(None if step is None else torch.tensor(step, device=device), by_scaler=True)
    skips.read()
    return skips.count, skips.streak, skips.unusual


def test_policies():
    good, bad = call(), call(math.nan, "drop")
    assert counted(good, bad, bad, good, bad) == (3, 1, True)
    assert counted(call(math.nan), call(math.inf, "zero")) == (0, 0, False)


def test_scalers():
    assert counted(0.0, 1.0, 1.0) == (2, 2, False)
    assert counted(0.0, "scaler", "scaler", 0.0, "scaler") == (3, 1, False)
    assert counted(None, *["scaler"] * 3) == (3, 3, True)
    assert counted(*["scaler"] * AT_FIRST) == (0, 0, False)
    assert counted(*["scaler"] * (AT_FIRST + 4)) == (4, 4, True)


def test_adaptive_thresholds():
    max_norm, skips = gradclip.AdaptiveThreshold(skip_above=2.0), Skips()
    found = []
    for norm in (1.0, 1.0, 9.0, 1.0, 9.0):
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.tensor([norm])
        gradclip.clip_grad_norm_([weight], max_norm)
        skips.clipped(call(norm, max_norm=max_norm))
        skips.passed(None, by_scaler=False)
        found.append(skips.count)
    assert found == [0, 0, 1, 1, 2]


def test_a_step_that_is_left_out():
    skips = Skips()
    assert [skips.clipped(call(norm)) for norm in (1.0, math.nan, 1.0)] == [False, False, True]
    # Two calls of other kinds before one step show nothing.
    assert not skips.clipped(call(math.nan))
    assert not skips.clipped(call(1.0, function="clip_grad_value_"))


def test_what_is_on_a_device_is_read_later():
    skips = Skips()
    values = [torch.tensor(value, device="meta") for value in (0.0, 1.0)]
    for value in values:
        skips.passed(value, by_scaler=False)
    assert skips.count == 0
    skips._pending = [
        (kind, torch.tensor(one), by) for (kind, _, by), one in zip(skips._pending, (0.0, 1.0), strict=True)
    ]
    skips.passed(None, by_scaler=False)  # in order, so it waits too
    skips.passed(torch.tensor(1.0), by_scaler=False)
    assert skips.count == 0
    skips.read()
    assert (skips.count, skips.streak) == (2, 1)


@pytest.mark.parametrize("by_scaler", [True, False])
def test_a_streak_ends_with_a_step(by_scaler):
    skips = Skips()
    for value in (0.0, 1.0, 1.0, 1.0, 0.0):
        skips.passed(torch.tensor(value), by_scaler=by_scaler)
    assert (skips.count, skips.streak, skips.unusual) == (3, 0, False)
