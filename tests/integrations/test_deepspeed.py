"""What `follow` does with an engine, here a stand-in. tests/trainers/test_deepspeed.py has DeepSpeed's own."""

import math
from types import SimpleNamespace

import pytest

import gradclip
from gradclip.integrations.deepspeed import follow


class Engine:
    """It has the methods of a DeepSpeed engine that `follow` uses, and clips one number."""

    def __init__(self, stage=2, **optimizer):
        self.stage, self.weight, self.gradient = stage, 0.0, 0.0
        self._config = SimpleNamespace(gradient_clipping=1.0)
        self._global_grad_norm, self.applied = None, True
        settings = {"clip_grad": 1.0, "step": None, "param_groups": []} | optimizer
        self.optimizer = SimpleNamespace(**settings) if optimizer.get("optimizer", "") is not None else None

    def gradient_clipping(self):
        return self._config.gradient_clipping

    def zero_optimization(self):
        return self.stage > 0

    def fp16_enabled(self):
        return False

    bfloat16_enabled = fp16_enabled

    def get_global_grad_norm(self):
        return self._global_grad_norm

    def was_step_applied(self):
        return self.applied

    def clip_fp32_gradients(self):
        raise AssertionError("DeepSpeed's own, which drops the norm")

    def step(self, gradient):
        self.gradient = gradient
        self._take_model_step(None)

    def _take_model_step(self, lr_kwargs):
        self._global_grad_norm = abs(self.gradient)
        self.applied = math.isfinite(self.gradient)
        if self.applied:
            self.weight -= min(self.gradient, self.optimizer.clip_grad)


def test_each_step_is_clipped_and_recorded():
    engine, monitor = Engine(), gradclip.Monitor()
    clipping = follow(engine, gradclip.AdaptiveThreshold(gradclip.QuantileRule()), monitor=monitor)
    for gradient in (3.0, 100.0, math.inf):
        engine.step(gradient)
    assert engine.weight == -9.0
    assert clipping.norm == math.inf
    assert engine.gradient_clipping() == engine.optimizer.clip_grad == 6.0
    assert monitor.counts == (3, 1, 1, 1)


def test_removed_it_clips_as_before():
    engine = Engine()
    clipping = follow(engine, 2.0)
    engine.step(5.0)
    clipping.remove()
    assert (engine.gradient_clipping(), engine.optimizer.clip_grad) == (1.0, 1.0)
    engine.step(5.0)
    assert engine.weight == -3.0
    follow(engine, 2.0)


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zenflow": True}, "uses ZenFlow"),
        ({"optimizer": None}, "has no optimizer"),
        ({"optimizer": SimpleNamespace(step=None, compute_grad_norm=False)}, "does not measure the norm"),
        ({"optimizer": SimpleNamespace(step=None)}, "SimpleNamespace has no clip_grad"),
    ],
)
def test_engines_that_are_refused(changes, message):
    engine = Engine()
    vars(engine).update(changes)
    before = dict(vars(engine))
    with pytest.raises(ValueError, match=message):
        follow(engine, 1.0)
    assert vars(engine) == before


def test_an_engine_is_followed_once():
    engine = Engine()
    follow(engine, 1.0)
    with pytest.raises(ValueError, match="follow was already called"):
        follow(engine, 1.0)


@pytest.mark.parametrize("wrong", [None, (Engine(), None), SimpleNamespace(step=None)])
def test_what_is_no_engine_is_refused(wrong):
    with pytest.raises(TypeError, match=r"engine must be a DeepSpeed engine, made by deepspeed\.initialize, got"):
        follow(wrong, 1.0)


def test_a_step_without_a_norm_raises():
    engine = Engine()
    follow(engine, 1.0)
    engine.get_global_grad_norm = lambda: None
    with pytest.raises(RuntimeError, match="has not measured the norm"):
        engine.step(1.0)


def test_the_norm_of_the_optimizer_that_gives_it_scaled():
    class FP16_UnfusedOptimizer(SimpleNamespace):  # noqa: N801
        pass

    engine = Engine()
    engine.optimizer = FP16_UnfusedOptimizer(clip_grad=1.0, step=None, loss_scale_config=SimpleNamespace(cur_scale=8.0))
    clipping = follow(engine, 1.0)
    engine.step(4.0)
    assert clipping.norm == 0.5


@pytest.mark.parametrize("keyword", ["max_grad_norm", "clip_grad"])
def test_a_keyword_of_another_library(keyword):
    with pytest.raises(TypeError):
        follow(Engine(), **{keyword: 1.0})
