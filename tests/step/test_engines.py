"""Engines are known by their types, and settings that they cannot follow are refused before anything changes."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import gradclip
from engines_alike import Chained
from engines_alike import Engine as DeepSpeed
from engines_alike import Optimizer as Megatron
from gradclip._src.step.handle import StepClipping
from gradclip._src.step.wrapped import is_deepspeed, is_megatron


def of_megatron(inner):
    """Return what looks like Megatron's own optimizers, which wrap one of PyTorch."""
    kind = type("Float16Optimizer", (), {"__module__": "megatron.core.optimizer", "step": lambda self: None})
    made = kind()
    made.optimizer, made.config = inner, SimpleNamespace(clip_grad=1.0)
    return made


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)


def test_engines_are_known():
    assert is_deepspeed(DeepSpeed())
    assert not is_megatron(DeepSpeed())
    for one in (Megatron(), Chained(Megatron()), of_megatron(sgd())):
        assert (is_deepspeed(one), is_megatron(one)) == (False, True)
    assert not is_megatron(sgd())
    assert not is_megatron(SimpleNamespace(config=SimpleNamespace(clip_grad=1.0)))


def test_the_settings_of_a_trainer_make_it_no_engine():
    """It steps an optimizer of PyTorch, which clips."""
    optimizer = sgd()
    trainer = SimpleNamespace(optimizer=optimizer, step=optimizer.step, config=SimpleNamespace(clip_grad=1.0))
    assert not is_megatron(trainer)
    assert isinstance(gradclip.clip_at_step(trainer, 1.0), StepClipping)


@pytest.mark.after_error
@pytest.mark.parametrize("engine", [DeepSpeed, Megatron])
@pytest.mark.parametrize(
    "settings",
    [
        {"ord": 1},
        {"fused": True},
        {"nonfinite": "skip"},
        {"nonfinite": "zero"},
        {"process_group": []},
        {"mesh": []},
        {"where": "*"},
        {"scope": "unit", "unit_axis": 0},
    ],
)
def test_settings_that_no_engine_can_follow_are_refused(engine, settings):
    one = engine()
    before = dict(vars(one))
    with pytest.raises(ValueError, match=rf"clips in its own step.* Leave out .*{next(iter(settings))}"):
        gradclip.clip_at_step(one, 1.0, **settings)
    assert vars(one) == before
    gradclip.clip_at_step(one, 1.0, ord=2.0, fused="auto")


def test_clipping_an_optimizer_imports_nothing_for_engines():
    code = (
        "import sys, torch, gradclip\n"
        "gradclip.clip_at_step(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0), 1.0)\n"
        "print([m for m in sys.modules if 'step.deepspeed' in m or 'step.megatron' in m or 'step.engine' == m[-11:]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("engine", [DeepSpeed, Megatron])
def test_patterns_of_names_are_refused(engine):
    with pytest.raises(ValueError, match="clips all gradients by one norm, so max_norm cannot have patterns"):
        gradclip.clip_at_step(engine(), {"*": 1.0})


@pytest.mark.parametrize("engine", [DeepSpeed, Megatron])
def test_numbers_of_engines(engine):
    one = engine(grad_norm_skip_threshold=math.inf) if engine is Megatron else engine()
    clipping = gradclip.clip_at_step(one, 2.0)
    assert clipping.numbers() == {}
    for norm in (1.0, 5.0):
        one.main_grad = norm
        one.step() if engine is Megatron else one.step(norm)
    shares = {"clipped_share": 0.5, "skipped_share": 0.0}
    assert clipping.numbers() == {"grad_norm": 5.0, "grad_norm_clipped": 2.0, **shares}
    assert (clipping.steps, clipping.threshold) == (2, 2.0)
