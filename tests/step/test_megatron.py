"""What Megatron-Core's main branch has, and no release yet: skipped steps, CUDA graphs. The optimizers are stand-ins.

tests/trainers/test_megatron.py has the optimizers of a release.
"""

import math
from types import SimpleNamespace

import pytest

import gradclip
from engines_alike import Chained, Optimizer
from gradclip import clip_at_step


def test_chained_optimizers_share_the_threshold_and_skip():
    shared = SimpleNamespace(clip_grad=1.0, grad_norm_skip_threshold=math.inf)
    first, second, other = Optimizer(shared), Optimizer(shared), Optimizer(SimpleNamespace(**vars(shared)))
    chain = Chained(first, second, other)
    monitor = gradclip.Monitor()
    clipping = clip_at_step(chain, gradclip.AdaptiveThreshold(skip_above=4.0), monitor=monitor)
    for gradients in ((3.0, 4.0, 0.0), (30.0, 0.0, 40.0), (0.0, 30.0, 0.0)):
        for one, gradient in zip(chain.chained_optimizers, gradients, strict=True):
            one.main_grad = gradient
        chain.step()
    # Norms 5, 50 and 30 with thresholds inf, 10 and 10: the second step is above 4 times 10 and skipped.
    assert [one.weight for one in chain.chained_optimizers] == pytest.approx([-3.0, -14.0, 0.0])
    assert (clipping.max_norm.num_clipped, clipping.max_norm.num_skipped) == (1, 1)
    assert monitor.counts == (3, 1, 1, 0)
    assert clipping.max_norm.max_norm == 10.0
    clipping.remove()
    assert vars(shared) == vars(other.config) == {"clip_grad": 1.0, "grad_norm_skip_threshold": math.inf}
    assert "step" not in vars(chain)


def test_a_step_that_its_own_setting_skips_counts_as_skipped():
    optimizer, monitor = Optimizer(grad_norm_skip_threshold=7.0), gradclip.Monitor()
    clipping = clip_at_step(optimizer, gradclip.AdaptiveThreshold(gradclip.QuantileRule()), monitor=monitor)
    for gradient in (3.0, 8.0, 6.5):
        optimizer.main_grad = gradient
        optimizer.step()
    assert monitor.counts == (3, 1, 1, 0)
    assert (clipping.max_norm.num_clipped, clipping.max_norm.num_skipped) == (1, 1)


def test_a_threshold_that_is_assigned_later_skips_nothing():
    optimizer = Optimizer(grad_norm_skip_threshold=math.inf)
    clipping = clip_at_step(optimizer, gradclip.AdaptiveThreshold(skip_above=4.0))
    updated = []
    for gradient in (3.0, 300.0, 300.0):
        optimizer.main_grad = gradient
        updated.append(optimizer.step()[0])
        if not updated[-1]:
            clipping.max_norm = 2.0
    assert updated == [True, False, True]
    assert optimizer.weight == pytest.approx(-5.0)


def test_a_step_in_a_graph_is_refused():
    with pytest.raises(ValueError, match="recorded in a CUDA graph"):
        clip_at_step(Optimizer(optimizer_cuda_graph=True), 1.0)
