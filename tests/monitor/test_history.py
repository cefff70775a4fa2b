"""Steps are kept with what is said of them, which may come before the step."""

import math

import numpy as np
import pytest

from gradclip._src.monitor.history import History
from gradclip._src.monitor.pending import Note, Pending
from gradclip._src.monitor.records import Counts, Handling, Step
from gradclip._src.monitor.saved import State
from gradclip._src.monitor.spikes import Spikes


def history(capacity=10, fetch_every=100, tell=None):
    return History(capacity, fetch_every, 0, Spikes(5), tell)


def pending(norm):
    return Pending.of(norm, 1.0, None, "propagate", None)


def test_what_was_noted_describes_the_next_step_only():
    kept = history()
    kept.note(Note(0.5))
    for norm in (1.0, 2.0):
        kept.add(pending(norm), Note())
    assert kept.steps() == [Step(1, 1.0, 1.0, loss=0.5), Step(2, 2.0, 1.0)]


def test_what_is_said_with_the_step_comes_first_and_a_later_note_adds_to_an_earlier_one():
    kept = history()
    kept.note(Note(0.5, "first"))
    kept.note(Note(0.25))
    kept.note(Note(None, "second"))
    kept.add(pending(1.0), Note(0.125))
    assert kept._pending[0].note == Note(0.125, "second")
    assert kept.last().loss == 0.125


@pytest.mark.after_error
def test_a_note_that_does_not_fit_stays_for_a_step_that_it_fits():
    kept = history()
    kept.note(Note(0.5))
    with pytest.raises(ValueError, match=r"loss must have the shape of norm, \(2,\), got \(\)"):
        kept.add(pending(np.ones(2)), Note())
    kept.add(pending(1.0), Note())
    assert kept.steps() == [Step(1, 1.0, 1.0, loss=0.5)]


def test_enough_steps_are_fetched_and_told():
    told = []
    kept = history(fetch_every=2, tell=told.append)
    for norm in (1.0, 2.0, 3.0):
        kept.add(pending(norm), Note())
    assert [step.norm for step in told] == [1.0, 2.0]
    kept.fetch()
    assert [step.norm for step in told] == [1.0, 2.0, 3.0]


def test_a_state_replaces_steps_and_notes():
    kept = history(capacity=1)
    kept.note(Note(0.5))
    kept.add(pending(math.inf), Note())
    kept.note(Note(0.75))
    kept.replace(State([Step(4, 2.0, 1.0), Step(5, 3.0, 1.0)], Counts(5, 2), 5, None))
    assert (kept.steps(), kept.counts(), kept.state().calls) == ([Step(5, 3.0, 1.0)], Counts(5, 2), 5)
    kept.add(pending(1.0), Note())
    assert kept.last() == Step(6, 1.0, 1.0)


def test_a_copy_has_the_note_and_goes_on_by_itself():
    kept = history()
    kept.note(Note(0.5))
    copied = History.of_plain(kept.plain(), None)
    copied.add(pending(1.0), Note())
    assert (copied.steps(), kept.steps()) == ([Step(1, 1.0, 1.0, loss=0.5)], [])


def test_calls_that_raise_one_after_the_other_wait_as_one():
    kept = history()
    for number in range(50):
        kept.add(Pending.of_missed(), Note(None, number))
    assert len(kept._pending) == 1
    kept.add(pending(1.0), Note())
    kept.add(Pending.of_missed(), Note(None, 50))
    assert [(spike.step, spike.context) for spike in kept.spikes()] == [(1, 0), (2, 50)]


def test_a_call_that_raised_does_not_change_what_is_known_of_the_policy():
    kept = history()
    kept.add(Pending.of(1.0, 1.0, None, "raise", None, 4.0), Note())
    kept.add(Pending.of_missed(), Note())
    assert kept.handling == Handling("raise", 4.0)
