"""Notes: what people misread, in words that fit the policy."""

from types import SimpleNamespace

import numpy as np
import pytest

import gradclip
from gradclip._src.monitor.advice import Advice
from gradclip._src.monitor.page.page import about_proposal, notes


def shown(monitor):
    return monitor._overview()


def fed(norms, max_norm=1.0, **settings):
    monitor = gradclip.Monitor(**settings)
    monitor.record(np.array(norms, float), max_norm, nonfinite="propagate")
    return monitor


def test_notes():
    (every,) = notes(shown(fed([2.0, 3.0])))
    assert every.startswith("100% of the steps that were neither skipped nor NaN were clipped")
    every, broken = notes(shown(fed([2.0, np.nan])))
    assert every.startswith("100% of the steps")
    assert broken.startswith("At 1 of 2 steps the norm was NaN or infinite.")
    (nothing,) = notes(shown(fed([0.5])))
    assert nothing.startswith("Nothing was clipped")
    (some,) = notes(shown(fed([2.0, 0.5, 3.0], capacity=2)))
    assert some.startswith("Pictures and percentiles show the last 2 of 3 steps")
    assert notes(shown(fed([2.0, 0.5]))) == []


@pytest.mark.parametrize(
    ("policies", "capacity", "said"),
    [
        (("drop", "drop"), 9, "They were skipped: their gradients became zeros."),
        (("drop",), 9, "That step was skipped: its gradients became zeros."),
        (("propagate", "propagate"), 9, '"drop" and "zero" prevent that.'),
        (("drop", "propagate"), 9, '1 of those kept were not skipped. With nonfinite="propagate"'),
        (("propagate", "drop"), 1, "Those that are kept were skipped"),
        (("propagate", "propagate"), 1, '"drop" and "zero" prevent that.'),
    ],
)
def test_what_is_said_of_norms_that_are_not_finite_depends_on_what_was_done(policies, capacity, said):
    monitor = gradclip.Monitor(capacity=capacity)
    for policy in policies:
        monitor.record(np.nan, 1.0, nonfinite=policy)
    note = next(note for note in notes(shown(monitor)) if "NaN or infinite" in note)
    assert said in note
    assert ("prevent" in note) == ("propagate" in policies and said[:5] != "Those")


def test_skipped_steps_are_not_counted_against_all_clipped():
    monitor = gradclip.Monitor()
    monitor.record(np.array([2.0, np.nan]), 1.0, nonfinite="drop")
    monitor.record(900.0, SimpleNamespace(max_norm=1.0, skip_above=10.0))
    assert (monitor.num_clipped, monitor.num_skipped) == (1, 2)
    assert notes(shown(monitor))[0].startswith("100% of the steps")
    monitor.record(0.5, 1.0)
    assert not notes(shown(monitor))[0].startswith("100% of the steps")


def test_nothing_clipped_is_not_said_of_what_was_skipped_or_nan():
    monitor = gradclip.Monitor()
    monitor.record(np.nan, 1.0)
    assert len(notes(shown(monitor))) == 1
    monitor.record(np.array([0.5, 90.0]), 1.0, skip_above=4.0)
    assert notes(shown(monitor))[0].endswith("above the threshold, except at skipped steps.")


def test_advice_knows_the_policy():
    advice, none, leave = Advice(3.0, (), state="spikes"), Advice(None, ()), Advice(3.0, (), state="leave")
    monitor = gradclip.Monitor()
    assert about_proposal(monitor._overview(), none) == []
    monitor.record(np.array([1.0, 9.0]), 2.0, skip_above=4.0)
    (skips,) = about_proposal(monitor._overview(), advice)
    assert skips.startswith("Steps above 4 times the threshold were skipped, not clipped.")
    assert skips.endswith("norms above 12 would be skipped.")
    assert about_proposal(monitor._overview(), none) == []
    monitor.record(1.0, 2.0, nonfinite="drop")
    assert about_proposal(monitor._overview(), advice) == []
    monitor.record(1.0, 5.0, nonfinite="zero")
    moved, zero = about_proposal(monitor._overview(), advice)
    assert moved.startswith("The threshold in use moved from step to step.")
    assert zero.startswith('nonfinite="zero" was on')
    assert about_proposal(monitor._overview(), leave) == [zero]
