"""What `clip_at_step` does with an engine, here a stand-in. tests/trainers/test_deepspeed.py has DeepSpeed's own."""

import math
from types import SimpleNamespace

import pytest

import gradclip
from engines_alike import Engine
from gradclip import clip_at_step


def test_each_step_is_clipped_and_recorded():
    engine, monitor = Engine(), gradclip.Monitor()
    clipping = clip_at_step(engine, gradclip.AdaptiveThreshold(gradclip.QuantileRule()), monitor=monitor)
    for gradient in (3.0, 100.0, math.inf):
        engine.step(gradient)
    assert engine.weight == -9.0
    assert clipping.norm == math.inf
    assert engine.gradient_clipping() == engine.optimizer.clip_grad == 6.0
    assert monitor.counts == (3, 1, 1, 1)


def test_removed_it_clips_as_before():
    engine = Engine()
    clipping = clip_at_step(engine, 2.0)
    engine.step(5.0)
    clipping.remove()
    assert (engine.gradient_clipping(), engine.optimizer.clip_grad) == (1.0, 1.0)
    engine.step(5.0)
    assert engine.weight == -3.0
    clip_at_step(engine, 2.0)


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
        clip_at_step(engine, 1.0)
    assert vars(engine) == before


def test_an_engine_is_followed_once():
    engine = Engine()
    clip_at_step(engine, 1.0)
    with pytest.raises(ValueError, match="the updates of this engine clip already"):
        clip_at_step(engine, 1.0)


@pytest.mark.parametrize("wrong", [None, (Engine(), None), SimpleNamespace(step=None)])
def test_what_is_no_engine_is_refused(wrong):
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer of torch\.optim, .* got"):
        clip_at_step(wrong, 1.0)


def test_a_step_without_a_norm_raises():
    engine = Engine()
    clip_at_step(engine, 1.0)
    engine.get_global_grad_norm = lambda: None
    with pytest.raises(RuntimeError, match="has not measured the norm"):
        engine.step(1.0)


def test_the_norm_of_the_optimizer_that_gives_it_scaled():
    class FP16_UnfusedOptimizer(SimpleNamespace):  # noqa: N801
        pass

    engine = Engine()
    engine.optimizer = FP16_UnfusedOptimizer(clip_grad=1.0, step=None, loss_scale_config=SimpleNamespace(cur_scale=8.0))
    clipping = clip_at_step(engine, 1.0)
    engine.step(4.0)
    assert clipping.norm == 0.5


@pytest.mark.parametrize("keyword", ["max_grad_norm", "clip_grad"])
def test_a_keyword_of_another_library(keyword):
    with pytest.raises(TypeError):
        clip_at_step(Engine(), **{keyword: 1.0})
