"""Coefficients so small that an optimizer may lose the gradients: a warning, once, and a line of the advice."""

import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip


def warned(monitor):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor.fetch()
    assert [one.category for one in caught] == [UserWarning] * len(caught)
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_it_warns_once_of_the_first_step_with_what_to_do():
    monitor = gradclip.Monitor()
    monitor.record(np.array([5.0, 4e9, 8e9]), 1.0)
    (said,) = warned(monitor)
    assert said.startswith(
        "at step 2 clipping multiplied the gradients by 2.5e-10: their norm was 4e+09, max_norm 1. Optimizers that"
    )
    assert "unscale them before clipping" in said
    assert "'max_norm' of its own, or None to only measure it" in said
    monitor.record(1e12, 1.0)
    assert warned(monitor) == []
    copied = pickle.loads(pickle.dumps(monitor))
    copied.record(1e12, 1.0)
    assert warned(copied) == []


@pytest.mark.parametrize(
    ("norm", "max_norm", "settings"),
    [
        (0.9e6, 1.0, {}),
        (1e6, 1.0, {}),
        (1e9, math.inf, {}),
        (1e9, 0.0, {}),
        (math.nan, 1.0, {}),
        (math.inf, 1.0, {}),
        (math.nan, 1.0, {"nonfinite": "drop"}),
        (1e9, 1.0, {"skip_above": 4.0}),
        (0.0, 1e-300, {}),
    ],
)
def test_it_does_not_warn(norm, max_norm, settings):
    monitor = gradclip.Monitor()
    monitor.record(norm, max_norm, **settings)
    assert warned(monitor) == []
    assert "coefficient" not in str(monitor.advise())


def test_it_warns_just_above():
    monitor = gradclip.Monitor()
    monitor.record(1.01e6, 1.0)
    assert len(warned(monitor)) == 1


def test_the_advice_counts_such_steps():
    monitor = gradclip.Monitor()
    norms = np.where(np.arange(40) % 10 == 9, 1e9, 2.0)
    monitor.record(norms, 1.0)
    warned(monitor)
    said = [one for one in monitor.advise().reasons if "coefficient" in one]
    assert [one.partition(".")[0] for one in said] == ["4 steps with a coefficient below 1e-06 were recorded"]
    few = gradclip.Monitor()
    few.record(1e9, 1.0)
    warned(few)
    assert "1 step with a coefficient below 1e-06 was recorded." in str(few.advise())


def test_a_group_of_its_own_warns_for_itself():
    monitor = gradclip.Monitor()
    tree = {"a": np.array([3e9, 4e9]), "b": np.array([1.0])}
    gradclip.clip_grad_norm_(tree, {"a": 1.0, "*": 1.0}, monitor=monitor)
    assert warned(monitor) == []
    assert len(warned(monitor.groups["a"])) == 1


def test_no_step_waits_for_it():
    class NoLook(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func)
            return func(*args, **(kwargs or {}))

    monitor = gradclip.Monitor(fetch_every=3)
    with NoLook():
        for _ in range(2):
            monitor.record(torch.tensor(1e12), torch.tensor(1.0))
    with pytest.warns(UserWarning, match="at step 1 clipping multiplied"):
        monitor.record(1.0, 1.0)
