"""Steps that `skip_above` skips, and what is observed of a step and when."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import gradclip
from frameworks import WITH_FLOAT32
from gradclip import AdaptiveThreshold, QuantileRule

LARGE = {"float32": (3e37, 200), "float64": (1e307, 500)}  # an element, and how many: their norm is beyond the dtype


def parameter(norm):
    return SimpleNamespace(grad=np.float32([0.6 * norm, 0.8 * norm]))


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero", "raise"])
@pytest.mark.parametrize(
    ("framework", "dtype"),
    [(f, dtype) for f in WITH_FLOAT32 if not f.jit for dtype in LARGE if dtype in f.dtypes],
    ids=lambda x: getattr(x, "name", x),
)
def test_finite_spikes_beyond_the_range_are_skipped(framework, dtype, policy):
    value, count = LARGE[dtype]
    for skip_above, left, counts in ((3.0, 0.0, (0, 1)), (math.inf, 2e6, (1, 0))):
        max_norm = AdaptiveThreshold(QuantileRule(), skip_above=skip_above)
        for scale in (1e6 * count ** (-1.0 if dtype == "float64" else -0.5), value):
            one = SimpleNamespace(grad=framework.array(np.full(count, scale), dtype))
            with framework.mode():
                norm = gradclip.clip_grad_norm_([one], max_norm, 2 if dtype == "float32" else 1, nonfinite=policy)
        assert float(norm) == math.inf
        after = np.abs(framework.to_numpy(one.grad)).astype(np.float64)
        assert (after.sum() if dtype == "float64" else np.linalg.norm(after)) == pytest.approx(left, rel=1e-4)
        assert (max_norm.num_clipped, max_norm.num_skipped) == counts


def test_a_multiple_beyond_the_range_skips_what_is_above_it():
    rule = QuantileRule(initial=1e36, window=2)
    for value, left in ((1e37, 1e36), (1e38, 0.0)):  # norms 1e39 and 1e40, the multiple is 2e39
        one = SimpleNamespace(grad=np.full(10_000, value, np.float32))
        gradclip.clip_grad_norm_([one], AdaptiveThreshold(rule, skip_above=2000.0))
        assert np.linalg.norm(one.grad.astype(np.float64)) == pytest.approx(left, rel=1e-4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_no_spike(value):
    max_norm = AdaptiveThreshold(skip_above=2.0)
    for gradient in ([1.0, 1.0], [1.0, value]):
        one = SimpleNamespace(grad=np.float32(gradient))
        gradclip.clip_grad_norm_([one], max_norm)
    assert np.isnan(one.grad).all()
    assert (max_norm.num_clipped, max_norm.num_skipped) == (0, 0)


def groups(parameters):
    return [{"params": iter(parameters[:1]), "lr": 0.1}, {"params": iter(parameters[1:])}]


@pytest.mark.parametrize("layers_every", [0, 1])
@pytest.mark.parametrize(
    "given",
    [
        groups,
        lambda p: iter(groups(p)),
        lambda p: tuple(groups(p)),
        lambda p: [{"params": zip("ab", p, strict=True)}],
        lambda p: zip("ab", p, strict=True),
    ],
)
def test_generators_in_parameter_groups_are_read_once(given, layers_every):
    max_norm, monitor = AdaptiveThreshold(skip_above=2.0), gradclip.Monitor(layers_every=layers_every)
    for norm in (1.0, 1.0, 100.0):
        both = [parameter(0.6 * norm), parameter(0.8 * norm)]
        gradclip.clip_grad_norm_(given(both), max_norm, monitor=monitor)
    assert not any(one.grad.any() for one in both)
    assert (max_norm.steps, max_norm.num_skipped, monitor.steps, monitor.num_skipped) == (3, 1, 3, 1)


def test_what_a_monitors_callback_stops_is_clipped_and_observed():
    max_norm, one = AdaptiveThreshold(QuantileRule(initial=1.0)), parameter(5.0)

    def callback(step, numbers):
        raise RuntimeError("the logger is down")

    with pytest.raises(RuntimeError, match="the logger is down"):
        gradclip.clip_grad_norm_([one], max_norm, monitor=gradclip.Monitor(fetch_every=1, callback=callback))
    assert np.linalg.norm(one.grad) <= 1.0
    assert (max_norm.steps, max_norm.num_clipped, float(max_norm.norm)) == (1, 1, pytest.approx(5.0))


@pytest.mark.parametrize("value", [0.5, math.nan, -1.0])
def test_skip_above_is_at_least_one(value):
    with pytest.raises(ValueError, match=r"skip_above must be from 1.0 to inf"):
        AdaptiveThreshold(skip_above=value)
