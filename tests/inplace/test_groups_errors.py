"""Parameter groups with thresholds of their own: errors name the group, and nothing has changed."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import gradclip


def groups_of(first, second, threshold=0.5):
    return [{"params": [first]}, {"params": [second], "max_norm": threshold}]


BAD = {
    "negative": (-1.0, ValueError, r"parameters\[1\]\['max_norm'\] must not be negative or NaN, got -1\.0"),
    "nan": (math.nan, ValueError, r"parameters\[1\]\['max_norm'\] must not be negative or NaN"),
    "text": ("1.0", TypeError, r"parameters\[1\]\['max_norm'\] must be a real number"),
    "list": ([1.0], TypeError, r"parameters\[1\]\['max_norm'\] must be a real number"),
    "class": (
        gradclip.AdaptiveThreshold,
        TypeError,
        r"parameters\[1\]\['max_norm'\] must be a real number.*This is a class",
    ),
    "vector": (np.ones(2), TypeError, r"parameters\[1\]\['max_norm'\] must be a real number"),
    "negative array": (np.array(-1.0), ValueError, r"parameters\[1\]\['max_norm'\] must not be negative"),
}


@pytest.mark.after_error
@pytest.mark.parametrize(("threshold", "error", "match"), BAD.values(), ids=BAD)
def test_a_bad_threshold_of_a_group_is_named(threshold, error, match):
    first, second = SimpleNamespace(grad=np.array([3.0, 4.0])), SimpleNamespace(grad=np.array([5.0]))
    adaptive = gradclip.AdaptiveThreshold()
    with pytest.raises(error, match=match):
        gradclip.clip_grad_norm_(groups_of(first, second, threshold), adaptive)
    with pytest.raises(error, match=match.replace(r"parameters\[1\]\['max_norm'\]", r"max_norm\['b'\]")):
        gradclip.clip_grad_norm_({"a": first, "b": second}, {"a": adaptive, "b": threshold})
    assert (first.grad.tolist(), second.grad.tolist(), adaptive.steps) == ([3.0, 4.0], [5.0], 0)


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"max_norm": -1.0}, ValueError),
        ({"ord": 0.5}, ValueError),
        ({"nonfinite": "ignore"}, ValueError),
        ({"nonfinite": "raise"}, FloatingPointError),
    ],
)
def test_after_an_error_nothing_has_changed(change, error):
    first, second = SimpleNamespace(grad=np.array([3.0, 4.0])), SimpleNamespace(grad=np.array([math.nan, 5.0]))
    adaptive, monitor = gradclip.AdaptiveThreshold(), gradclip.Monitor()
    with pytest.raises(error):
        gradclip.clip_grad_norm_(groups_of(first, second, adaptive), **{"max_norm": 1.0, "monitor": monitor, **change})
    assert first.grad.tolist() == [3.0, 4.0]
    assert second.grad[1] == 5.0
    assert (adaptive.steps, monitor.steps, monitor.groups) == (0, 0, {})


def test_gradients_that_cannot_be_written_are_noticed_before_any_is():
    read_only = np.array([5.0])
    read_only.flags.writeable = False

    class Frozen:
        grad = property(lambda self: read_only)

    first = SimpleNamespace(grad=np.array([3.0, 4.0]))
    with pytest.raises(TypeError, match=r"parameters\[1\]\['params'\]\[0\]\.grad cannot be written"):
        gradclip.clip_grad_norm_(groups_of(first, Frozen()), 1.0)
    assert first.grad.tolist() == [3.0, 4.0]


@pytest.mark.after_error
def test_arrays_of_a_tree_that_share_memory_have_one_threshold():
    memory = np.array([3.0, 4.0, 5.0])
    tree = {"a": memory[:2], "b": memory[1:]}
    with pytest.raises(ValueError, match=r"share memory, so they cannot be scaled by different numbers in place"):
        gradclip.clip_grad_norm_(tree, {"a": 1.0, "b": 2.0})
    assert memory.tolist() == [3.0, 4.0, 5.0]
