"""Stand-ins for Megatron-Core's optimizers. They read the configuration as its `step` methods do."""

import math
from types import SimpleNamespace

import pytest

import gradclip
from gradclip.integrations.megatron import follow


class Optimizer:
    """One weight, whose gradient is set. `overflows` is what its gradient scaler finds."""

    def __init__(self, config=None, **settings):
        self.config = config or SimpleNamespace(clip_grad=1.0, **settings)
        self.weight, self.main_grad, self.overflows = 0.0, 0.0, False

    def step(self):
        if self.overflows:
            return False, None, None
        norm = 0.0
        if self.config.clip_grad > 0.0:
            norm = abs(self.main_grad)
            self.clip(norm)
        self.weight -= self.main_grad
        return True, norm, 0

    def clip(self, norm):
        self.main_grad *= min(1.0, self.config.clip_grad / (norm + 1e-6))


class Chained:
    """It measures all, clips each by its own configuration, and skips above the threshold of any."""

    def __init__(self, *optimizers):
        self.chained_optimizers = optimizers
        self.config = optimizers[0].config

    def step(self):
        norm = math.hypot(*(one.main_grad for one in self.chained_optimizers))
        skip = False
        for one in self.chained_optimizers:
            if one.config.clip_grad > 0.0:
                one.clip(norm)
            skip |= norm > one.config.grad_norm_skip_threshold
        for one in () if skip else self.chained_optimizers:
            one.weight -= one.main_grad
        return not skip, norm, None


def stepped(optimizer, *gradients):
    optimizer.main_grad = gradients[0]
    return optimizer.step()


def test_each_step_is_clipped_and_recorded():
    optimizer, monitor = Optimizer(), gradclip.Monitor()
    clipping = follow(optimizer, gradclip.AdaptiveNorm(gradclip.QuantileThreshold()), monitor=monitor)
    assert stepped(optimizer, 3.0) == (True, 3.0, 0)
    assert stepped(optimizer, 100.0) == (True, 100.0, 0)
    assert optimizer.weight == pytest.approx(-9.0)
    assert (clipping.norm, optimizer.config.clip_grad) == (100.0, 6.0)
    optimizer.overflows = True
    assert optimizer.step() == (False, None, None)
    assert clipping.norm == math.inf
    assert monitor.counts == (3, 1, 1, 1)
    assert clipping.max_norm.skipped == 1


def test_chained_optimizers_share_the_threshold_and_skip():
    shared = SimpleNamespace(clip_grad=1.0, grad_norm_skip_threshold=math.inf)
    first, second, other = Optimizer(shared), Optimizer(shared), Optimizer(SimpleNamespace(**vars(shared)))
    chain = Chained(first, second, other)
    monitor = gradclip.Monitor()
    clipping = follow(chain, gradclip.AdaptiveNorm(skip_above=4.0), monitor=monitor)
    for gradients in ((3.0, 4.0, 0.0), (30.0, 0.0, 40.0), (0.0, 30.0, 0.0)):
        for one, gradient in zip(chain.chained_optimizers, gradients, strict=True):
            one.main_grad = gradient
        chain.step()
    # Norms 5, 50 and 30 with thresholds inf, 10 and 10: the second step is above 4 times 10 and skipped.
    assert [one.weight for one in chain.chained_optimizers] == pytest.approx([-3.0, -14.0, 0.0])
    assert (shared.clip_grad, other.config.clip_grad, other.config.grad_norm_skip_threshold) == (10.0, 10.0, 40.0)
    assert (clipping.max_norm.clipped, clipping.max_norm.skipped) == (1, 1)
    assert monitor.counts == (3, 1, 1, 0)
    clipping.remove()
    assert vars(shared) == vars(other.config) == {"clip_grad": 1.0, "grad_norm_skip_threshold": math.inf}
    assert "step" not in vars(chain)


def test_a_step_that_its_own_setting_skips_counts_as_skipped():
    chain, monitor = Chained(Optimizer(grad_norm_skip_threshold=7.0)), gradclip.Monitor()
    clipping = follow(chain, gradclip.AdaptiveNorm(gradclip.QuantileThreshold()), monitor=monitor)
    for gradient in (3.0, 8.0, 6.5):
        chain.chained_optimizers[0].main_grad = gradient
        chain.step()
    assert monitor.counts == (3, 1, 1, 0)
    assert (clipping.max_norm.clipped, clipping.max_norm.skipped) == (1, 1)


def test_without_the_setting_nothing_can_be_skipped():
    with pytest.raises(ValueError, match="This Megatron-Core cannot skip steps with a large norm"):
        follow(Optimizer(), gradclip.AdaptiveNorm(skip_above=4.0))


def test_removed_it_clips_as_before():
    optimizer = Optimizer(grad_norm_skip_threshold=7.0)
    clipping = follow(optimizer, 2.0)
    stepped(optimizer, 5.0)
    assert vars(optimizer.config) == {"clip_grad": 2.0, "grad_norm_skip_threshold": 7.0}
    clipping.remove()
    stepped(optimizer, 5.0)
    assert optimizer.weight == pytest.approx(-3.0)
    assert vars(optimizer.config) == {"clip_grad": 1.0, "grad_norm_skip_threshold": 7.0}


@pytest.mark.after_error
def test_an_optimizer_is_followed_once():
    optimizer = Optimizer()
    follow(optimizer, 2.0)
    step = optimizer.step
    with pytest.raises(ValueError, match="follow was already called"):
        follow(optimizer, 2.0)
    assert optimizer.step is step


def test_a_step_in_a_graph_is_refused():
    with pytest.raises(ValueError, match="recorded in a CUDA graph"):
        follow(Optimizer(optimizer_cuda_graph=True), 1.0)


@pytest.mark.parametrize("wrong", [None, SimpleNamespace(clip_grad=1.0), SimpleNamespace(step=print, config=None)])
def test_what_is_no_optimizer_of_megatron_is_refused(wrong):
    with pytest.raises(TypeError, match="optimizer must be a Megatron-Core optimizer, with a step and a config"):
        follow(wrong, 1.0)


def test_zero_is_refused():
    with pytest.raises(ValueError, match="This Megatron-Core takes 0 to mean"):
        follow(Optimizer(), 0.0)
