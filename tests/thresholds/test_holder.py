"""The holder of a threshold that follows: in loops, over processes' norms, on accelerators, saved and loaded."""

import copy
import io
import math
import pickle
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
import gradclip._src.backends.torch.framework as torch_backend
from gradclip import AdaptiveThreshold, QuantileRule
from gradclip.integrations.optax import adaptive_clip_by_global_norm, skip_spikes
from gradclip.integrations.torch import clip_grad_norm_ as torch_clip_grad_norm_

NORMS = [5.0, 10.0, math.nan, 0.0, 500.0, 7.0, math.inf, 6.0, 0.1]
CLIPPED_TO = [5.0, 10.0, 0.0, 0.0, 10.0, 7.0, 0.0, 6.0, 0.1]  # thresholds: inf, 10, 10, 10, 10, 20, 14, 14, 14


def parameter(norm, make=np.float32):
    return SimpleNamespace(grad=make([0.6 * norm, 0.8 * norm]))


def tensor(norm):
    made = torch.nn.Parameter(torch.zeros(2))
    made.grad = torch.tensor([0.6 * norm, 0.8 * norm], dtype=torch.float32)
    return made


MAKE = {
    "numpy": parameter,
    "torch": tensor,
    "jax": lambda norm: parameter(norm, lambda x: jnp.array(x, jnp.float32)),
}


def run(max_norm, norms, make=parameter, **options):
    """Clip a gradient of each norm; return the norms after, and the thresholds."""
    after, thresholds = [], []
    for norm in norms:
        one = make(norm)
        found = gradclip.clip_grad_norm_([one], max_norm, **{"nonfinite": "drop", **options})
        assert found is max_norm.norm
        after.append(float(np.linalg.norm(np.asarray(one.grad))))
        thresholds.append(float(max_norm.max_norm))
    return after, thresholds


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_each_step_is_clipped_by_what_was_before(make):
    max_norm = AdaptiveThreshold(QuantileRule(window=4))
    after, thresholds = run(max_norm, NORMS, make)
    np.testing.assert_allclose(after, CLIPPED_TO, rtol=1e-6)
    np.testing.assert_allclose(thresholds, [math.inf, 10, 10, 10, 10, 20, 14, 14, 14], rtol=1e-6)
    assert (max_norm.steps, max_norm.num_clipped, max_norm.num_skipped) == (9, 1, 2)
    assert float(max_norm.norm) == pytest.approx(0.1)
    assert max_norm.next_max_norm == pytest.approx(12.0)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_it_is_the_rule_with_its_history(make):
    rule = QuantileRule(factor=1.1, quantile=0.3, window=5)
    max_norm, history = AdaptiveThreshold(rule), rule.init()
    for norm in np.random.default_rng(1).exponential(size=30):
        gradclip.clip_grad_norm_([make(norm)], max_norm)
        assert max_norm.max_norm == rule.max_norm(history)
        history = rule.observe(history, np.asarray(max_norm.norm))
    np.testing.assert_array_equal(max_norm.history.norms, history.norms)


@pytest.mark.after_error
def test_a_failed_step_is_not_observed():
    max_norm = AdaptiveThreshold()
    with pytest.raises(FloatingPointError):
        gradclip.clip_grad_norm_([parameter(math.nan)], max_norm, nonfinite="raise")
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        gradclip.clip_grad_norm_([parameter(1.0)], max_norm, nonfinite="never")
    assert (max_norm.steps, max_norm.norm) == (0, None)


def test_it_is_observed_once_a_step_whatever_yields_the_parameters():
    max_norm = AdaptiveThreshold(skip_above=2.0)
    for norm in (1.0, 1.0, 100.0):
        gradclip.clip_grad_norm_((p for p in [parameter(norm)]), max_norm)
    assert max_norm.history.count == max_norm.steps == 3
    torch_clip_grad_norm_([tensor(1.0)], max_norm)
    assert max_norm.steps == 4


def test_wide_gradients_widen_the_history():
    max_norm = AdaptiveThreshold()
    for make in (np.float32, np.float64):
        gradclip.clip_grad_norm_([parameter(1e3, make)], max_norm)
    gradclip.clip_grad_norm_([parameter(1e200, np.float64)], max_norm)
    assert max_norm.history.norms.dtype == np.float64
    assert float(max_norm.norm) in max_norm.history.norms


def test_norms_of_one_order():
    max_norm = AdaptiveThreshold()
    gradclip.clip_grad_norm_([parameter(1.0)], max_norm, 1)
    with pytest.raises(ValueError, match=r"has observed norms of ord=1.0, got ord=2.0. Make one for each order."):
        gradclip.clip_grad_norm_([parameter(1.0)], max_norm)
    gradclip.clip_grad_norm_([parameter(1.0)], max_norm, ord=1)


# Skipping


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_spikes_are_skipped_and_observed(make):
    max_norm = AdaptiveThreshold(QuantileRule(window=3), skip_above=10.0)
    after, _ = run(max_norm, [1.0, 1.0, 19.0, 21.0, 21.0, 21.0], make)
    np.testing.assert_allclose(after, [1.0, 1.0, 2.0, 0.0, 21.0, 21.0], rtol=1e-6)
    assert (max_norm.num_clipped, max_norm.num_skipped) == (1, 1)


# Accelerators


class NoWaits(TorchDispatchMode):
    """Raises where a value is looked at, for which an accelerator would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skip_above", [math.inf, 10.0])
def test_on_an_accelerator_nothing_waits_and_all_is_the_same(skip_above):
    here, there = (AdaptiveThreshold(QuantileRule(window=4), skip_above=skip_above) for _ in range(2))
    expected, _ = run(here, NORMS, tensor)
    after = []
    with mock.patch.object(torch_backend, "in_host_memory", return_value=False):
        for norm in NORMS:
            one = tensor(norm)
            with NoWaits():
                gradclip.clip_grad_norm_([one], there, nonfinite="drop")
            after.append(float(one.grad.norm()))
        assert isinstance(there.next_max_norm, torch.Tensor)
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    assert (there.steps, there.num_clipped, there.num_skipped) == (here.steps, here.num_clipped, here.num_skipped)
    assert there.state_dict() == here.state_dict()


def test_the_history_moves_to_the_device_of_the_gradients():
    """The meta device stands for a second accelerator."""
    max_norm = AdaptiveThreshold(skip_above=3.0)
    with mock.patch.object(torch_backend, "in_host_memory", return_value=False):
        for device in ("cpu", "cpu", "meta", "meta"):
            one = torch.nn.Parameter(torch.zeros(2, device=device))
            one.grad = torch.ones(2, device=device)
            norm = gradclip.clip_grad_norm_([one], max_norm)
            kept = (norm, max_norm.history.norms, max_norm.history.count, max_norm.next_max_norm)
            assert {x.device.type for x in kept} == {device}


# Saving and loading


def test_a_resumed_run_goes_on_to_the_bit():
    norms = np.random.default_rng(2).exponential(size=40).astype(np.float32)
    rule = QuantileRule(factor=1.1, window=8)
    whole, first, second = AdaptiveThreshold(rule), AdaptiveThreshold(rule), AdaptiveThreshold(rule)
    run(whole, norms, tensor)
    run(first, norms[:20], tensor)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.state_dict() == first.state_dict()
    assert (second.max_norm, second.next_max_norm) == (first.max_norm, first.next_max_norm)
    run(second, norms[20:], tensor)
    assert second.state_dict() == whole.state_dict()


def test_a_run_may_be_resumed_elsewhere():
    here, there = AdaptiveThreshold(), AdaptiveThreshold()
    run(here, [1.0, 2.0, 3.0], tensor)
    there.load_state_dict(here.state_dict())
    with mock.patch.object(torch_backend, "in_host_memory", return_value=False):
        run(there, [4.0], tensor)
        assert isinstance(there.history.norms, torch.Tensor)
    run(there, [5.0], tensor)
    run(here, [4.0, 5.0], tensor)
    assert here.state_dict() == there.state_dict()


@pytest.mark.parametrize("window", [2, 16])
def test_another_window_keeps_the_newest(window):
    saved, loaded = AdaptiveThreshold(QuantileRule(window=4)), AdaptiveThreshold(QuantileRule(window=window))
    run(saved, [1.0, 2.0, 3.0, 4.0, 5.0])
    loaded.load_state_dict(saved.state_dict())
    kept = [5.0, 4.0, 3.0, 2.0][:window]
    np.testing.assert_allclose(loaded.history.norms[: len(kept)], kept, rtol=1e-6)
    assert loaded.history.count == len(kept)


def test_a_state_of_another_order_is_refused():
    one, two = AdaptiveThreshold(), AdaptiveThreshold()
    run(one, [1.0], ord=1)
    run(two, [1.0], ord="inf")
    with pytest.raises(
        ValueError, match=r"state holds norms of ord=1.0, but this AdaptiveThreshold has observed .* ord=inf"
    ):
        two.load_state_dict(one.state_dict())
    fresh = AdaptiveThreshold()
    fresh.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match=r"has observed norms of ord=inf, got ord=2.0"):
        run(fresh, [1.0])


@pytest.mark.parametrize("state", [{}, {"norms": []}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match=r"an AdaptiveThreshold's state has ord, dtype, norms, .*; got "):
        AdaptiveThreshold().load_state_dict(state)


@pytest.mark.after_error
def test_a_state_that_is_refused_changes_nothing():
    max_norm, other = AdaptiveThreshold(), AdaptiveThreshold()
    run(other, [1.0, 2.0])
    with pytest.raises(ValueError, match="the state is damaged"):
        max_norm.load_state_dict({**other.state_dict(), "steps": None})
    assert max_norm.state_dict() == AdaptiveThreshold().state_dict()


def test_states_of_orders_that_pytorch_alone_has_are_taken():
    max_norm, other = AdaptiveThreshold(), AdaptiveThreshold()
    torch_clip_grad_norm_([tensor(1.0)], max_norm, norm_type=0.5)
    other.load_state_dict(max_norm.state_dict())
    for one in (max_norm, other):
        torch_clip_grad_norm_([tensor(2.0)], one, norm_type=0.5)
    assert other.state_dict() == max_norm.state_dict()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_by_themselves(copied):
    max_norm = AdaptiveThreshold()
    run(max_norm, [1.0])
    other = copied(max_norm)
    run(other, [2.0])
    assert (max_norm.steps, other.steps) == (1, 2)
    assert repr(AdaptiveThreshold(skip_above=3)).endswith("upper=inf), skip_above=3.0)")


# What does not take it


@pytest.mark.parametrize(
    "call",
    [
        lambda c: gradclip.clip_by_global_norm({"w": np.ones(2)}, c),
        lambda c: gradclip.clip_by_layer_norm({"w": np.ones(2)}, c),
        lambda c: gradclip.clip_by_global_norm({"w": jnp.ones(2)}, c),
    ],
)
def test_functional_calls_name_the_two_lines_to_write(call):
    with pytest.raises(TypeError) as raised:
        call(AdaptiveThreshold())
    assert "clipped, norm = gradclip.clip_by_global_norm(tree, rule.max_norm(history))\n" in str(raised.value)
    assert "history = rule.observe(history, norm)" in str(raised.value)


@pytest.mark.parametrize("rule", [1.0, AdaptiveThreshold(), QuantileRule])
def test_a_rule_is_a_rule(rule):
    for call in (AdaptiveThreshold, adaptive_clip_by_global_norm, lambda rule: skip_spikes(optax.sgd(1.0), rule)):
        with pytest.raises(TypeError, match=r"rule must be a gradclip.SpreadRule, SteadyRule or QuantileRule, or None"):
            call(rule)


def test_a_rule_is_no_threshold():
    for call in (gradclip.clip_by_global_norm, gradclip.clip_grad_norm_):
        with pytest.raises(
            TypeError, match=r"It is a rule: pass rule.max_norm\(history\), or a gradclip.AdaptiveThreshold"
        ):
            call({"w": np.ones(2)}, QuantileRule())


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_norms_without_values_are_not_kept(transform):
    max_norm = AdaptiveThreshold()
    run(max_norm, [1.0], MAKE["jax"])

    def clip(gradient):
        return gradclip.clip_grad_norm_([SimpleNamespace(grad=gradient)], max_norm)

    with pytest.raises(TypeError, match=r"the norm is traced: .* Call it outside jit"):
        transform(clip)(jnp.ones((3, 2)))
    assert max_norm.steps == 1
    run(max_norm, [2.0], MAKE["jax"])
    assert max_norm.steps == 2


@pytest.mark.parametrize(
    "as_norm", [float, np.float32, torch.tensor, jnp.asarray], ids=["float", "NumPy", "torch", "JAX"]
)
def test_steps_clipped_by_other_means_are_observed(as_norm):
    by_hand, called = (AdaptiveThreshold(QuantileRule(window=3), skip_above=8.0) for _ in range(2))
    for norm in (1.0, 4.0, 3.0, math.nan, 100.0, 2.0):
        gradclip.clip_grad_norm_(np.array([norm]), called)
        by_hand.observe(as_norm(norm))
        assert float(by_hand.next_max_norm) == float(called.next_max_norm)
        assert float(by_hand.max_norm) == float(called.max_norm)
    assert (by_hand.steps, by_hand.num_clipped, by_hand.num_skipped) == (6, called.num_clipped, called.num_skipped)
    assert (called.num_clipped, called.num_skipped) == (2, 1)


def test_what_is_no_norm_is_not_observed():
    max_norm = AdaptiveThreshold()
    max_norm.observe(1.0, ord=1)
    for norm, error in (
        ("1", TypeError),
        (True, TypeError),
        (np.ones(2), TypeError),
        (None, TypeError),
        (-1.0, ValueError),
    ):
        with pytest.raises(error, match=r"^norm must"):
            max_norm.observe(norm, ord=1)
    with pytest.raises(ValueError, match="observed norms of ord=1"):
        max_norm.observe(1.0)
    assert max_norm.steps == 1
