"""What a guard may be asked for."""

import math

import pytest

import gradclip
from gradclip._src.core.norms import Order
from gradclip._src.guard.settings import Settings, as_number, seems_a_handle


def settings(**changes):
    given = {"every": 100, "order": Order(2.0), "on_mistake": "warn", "stop_after": None}
    return Settings(**(given | {"process_group": None, "mesh": None, "replicas": None} | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every must be .* got 1.5 of type float"),
        ({"every": True}, TypeError, "got True of type bool"),
        ({"stop_after": 0}, ValueError, "stop_after must be at least 1"),
        ({"stop_after": "5"}, TypeError, "stop_after must be .* got '5'"),
        ({"on_mistake": "ignore"}, ValueError, "on_mistake must be 'warn' or 'raise', got 'ignore'"),
    ],
)
def test_what_is_wrong_is_said(changes, kind, words):
    with pytest.raises(kind, match=words):
        settings(**changes)


def test_which_steps_it_looks_at():
    assert [step for step in range(1, 11) if settings(every=4).is_look(step)] == [1, 2, 4, 8]
    assert all(settings(every=1).is_look(step) for step in range(1, 9))


def test_no_other_processes():
    assert settings().ranks([]) is None
    assert settings(replicas=True).ranks([]) is None


def test_thresholds_as_numbers():
    assert [as_number(one) for one in (1, 2.5, None, math.nan, {"a": 1.0})] == [1.0, 2.5, math.inf, math.inf, math.inf]
    assert seems_a_handle(gradclip.AdaptiveThreshold())
    assert not seems_a_handle(1.0)
