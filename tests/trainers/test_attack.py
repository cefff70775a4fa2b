"""A short run of the attack that needs Flower, always with the same cases; and that it finds what it is for."""

from unittest import mock

import pytest

from attack import run
from gradclip.integrations import _flower_replies, _flower_strategies

SEED, CASES, PARTS = 12, 60, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found(part):
    found = {number: problem for number in range(part, CASES, PARTS) if (problem := run.case("clients", SEED, number))}
    assert not found, "\n".join(f"number {number} of seed {SEED}: {problem}" for number, problem in found.items())


CLIPPED = _flower_strategies.clipped_parameters
WRONG = {
    "Flower's evaluation": (
        _flower_strategies._Private,
        "aggregate_evaluate",
        lambda self, number, replies: self.strategy.aggregate_evaluate(number, replies),
    ),
    "metrics in any form": (_flower_replies, "_of_usual_metrics", lambda replies, task: replies),
    "names in any form": (_flower_replies, "_name_alike", lambda replies, kinds: None),
    "weights of any size": (_flower_replies, "_MOST", 1e9),
    "replies that need not fit": (_flower_replies, "_problem", lambda *replies: None),
    "updates that are too long": (
        _flower_strategies,
        "clipped_parameters",
        lambda new, old, most: CLIPPED(new, old, 1.01 * most),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what):
    with mock.patch.object(*WRONG[what]):
        assert any(run.case("clients", SEED, number) for number in range(CASES))
