"""What verdicts say."""

import math

import pytest

from gradclip._src.updates import verdict
from gradclip._src.updates.verdict import Measurement, UpdateCheck, refusal


def test_a_verdict_is_true_only_if_the_update_is_accepted():
    assert UpdateCheck(True, "", 1.0, 0.0)
    assert not UpdateCheck(False, "", 1.0, 0.5)
    assert bool(UpdateCheck(False, "", 1.0, 0.5)) is False


def test_names_stay_as_they_are_at_the_start_of_a_sentence():
    assert verdict.sentence(["the norm is 1", "and so on"]) == "The norm is 1; and so on."
    assert verdict.sentence(["'w' is missing"]) == "'w' is missing."
    assert verdict.sentence(["anna.npz is damaged"]) == "anna.npz is damaged."


def test_names_are_short_and_printable():
    assert verdict.shown("['w']") == "['w']"
    assert verdict.shown("encoder.w") == "'encoder.w'"
    assert verdict.shown("") == "the array"
    assert verdict.shown("a\n\x1b[31m") == r"'a\n\x1b[31m'"
    assert len(verdict.shown("w" * 10_000)) < 100


def test_errors_in_one_line():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError

    assert verdict.in_one_line(ValueError("a\n  b\x07.")) == r"a b\x07"
    assert verdict.in_one_line(SilentError()) == "SilentError"
    assert verdict.in_one_line(KeyError()) == "KeyError"
    assert len(verdict.in_one_line(ValueError("a" * 10_000))) == 300


@pytest.mark.parametrize(
    ("shares", "order", "said"),
    [
        ([0.5, 0.25, 0.2496, 0.0004], 2.0, "; norm**2 lies 50% in 'a', 25% in 'b', 25% in 'c'"),
        ([0.0, 1.0, 0.0, 0.0], 1.0, "; the norm lies 100% in 'b'"),
        ([0.9999, 0.0, 0.0, 0.0001], 3.0, "; norm**3 lies 100% in 'a', less than 0.1% in 'd'"),
        ([0.0, 0.0, 1.0, 0.0], math.inf, "; the largest magnitude is in 'c'"),
        ([0.0, 0.0, 1.0, 0.0], -math.inf, "; the smallest magnitude is in 'c'"),
    ],
)
def test_where_a_norm_lies(shares, order, said):
    assert verdict.heaviest(list("abcd"), shares, order) == said
    assert verdict.heaviest(["a"], [1.0], order) == ""


def test_measurements_in_words():
    fine = Measurement(5.0, 2, 1000, ["n"], [], [])
    assert str(fine) == "The norm of 2 arrays with 1,000 numbers is 5; 1 array of integers: 'n'."
    assert str(Measurement.failed("it is empty")) == "It cannot be measured; it is empty."
    assert str(refusal("it is empty")) == "REFUSED. It is empty."
