"""What follows from what happened before a step: stories in letters, judged."""

import math
from types import SimpleNamespace

import pytest

from gradclip._src.guard.judge import Facts, judged
from gradclip._src.guard.window import GradientOperation
from gradclip._src.step.heard import ClipCall

MINE = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
OTHERS = [SimpleNamespace(name="c")]


def call(parameters=MINE, max_norm=1.0, norm=5.0, **settings):
    return ClipCall("clip_grad_norm_", parameters, len(parameters), len(parameters), max_norm, norm, 2.0, **settings)


STEPS = {
    "B": GradientOperation("backward", fresh=True),  # a pass that finds no gradients
    "b": GradientOperation("backward"),  # one that adds to gradients
    "s": GradientOperation("scaled", ratio=0.0123, whole=1.0),
    "m": GradientOperation("scaled", ratio=0.5, whole=7.0),  # a mean
    "p": GradientOperation("partly", ratio=0.1),
    "c": GradientOperation("clip", call=call()),
    "n": GradientOperation("clip", call=call(norm=0.0)),  # it finds no gradients
    "i": GradientOperation("clip", call=call(max_norm=math.inf)),  # it measures
    "h": GradientOperation("clip", call=call(MINE[:1])),
    "o": GradientOperation("clip", call=call(OTHERS)),
    "e": GradientOperation("clip", call=call([])),
    "t": GradientOperation("clip", call=call(norm=2e6)),
    "w": GradientOperation("clip", call=call(in_backward=True)),
    "5": GradientOperation("clip", call=call(max_norm=5.0)),
}


def found(story, norm=1.0, max_norm=1.0, **facts):
    happened = [STEPS[letter] for letter in story]
    given = {"norm_of": lambda parameters: 2.0 * len(parameters), "parameters": MINE} | facts
    return [kind for kind, _ in judged(Facts(norm, max_norm, happened, **given))]


@pytest.mark.parametrize("story", ["Bc", "Bbbbc", "BcBc", "Bcc", "Bi", "cBc", "BwBw", "Bwbw", "bc", "ic", "hBc", "nBc"])
def test_nothing_is_wrong(story):
    assert found(story) == []


@pytest.mark.parametrize(
    ("story", "norm", "kind"),
    [
        ("cB", 5.0, "after_step"),
        ("cB", 0.5, "after_step"),
        ("cBb", 5.0, "after_step"),
        ("sB", 5.0, "after_step"),
        ("nB", 5.0, "before_backward"),
        ("nBbb", 0.5, "before_backward"),
        ("Bh", 1.0, "other_parameters"),
        ("Bh", 5.0, "other_parameters"),
        ("Bo", 5.0, "other_parameters"),
        ("Bp", 5.0, "other_parameters"),
        ("Be", 0.5, "used_up"),
        ("eB", 5.0, "used_up"),
        ("Bcb", 5.0, "clipped_twice"),
        ("Bcbc", 1.0, "clipped_twice"),
        ("Bsbs", 1.0, "clipped_twice"),
        ("Bt", 1.0, "tiny_coefficient"),
        ("B", 5.0, "not_clipped"),
        ("B5", 5.0, "not_clipped"),
        ("Bi", 5.0, "not_clipped"),
        ("BcB", 5.0, "not_clipped"),
        ("Bc", 5.0, "not_clipped"),
        ("Bc", math.nan, "nonfinite"),
    ],
)
def test_what_is_wrong(story, norm, kind):
    assert found(story, norm) == [kind]


@pytest.mark.parametrize(
    ("story", "norm", "facts"),
    [
        ("sB", 0.5, {}),  # scaled by zero_grad or others, and small all the same
        ("Bmb", 0.5, {}),  # a mean of micro-batches or of processes, and no clip
        ("Bo", 0.5, {}),  # another optimizer's call
        ("B", 5.0, {"after_step": False}),  # the first step: the call may come after it
        ("B", 5.0, {"by_parts": lambda: True}),
        ("Bhe", 1.0, {"parameters": MINE[:1]}),
        ("B", 0.1, {"known": (5.0, 1.0)}),
        ("Bc", 1.0005, {}),  # other libraries round
        ("Bh", 1.0, {"norm_of": lambda parameters: 0.0}),
        ("Bh", 9.0, {"max_norm": math.inf}),
        ("cB", 5.0, {"known": (5.0, 5.0), "max_norm": 5.0}),
    ],
)
def test_what_is_right_after_all(story, norm, facts):
    assert found(story, norm, **facts) == []


def test_scaled_losses():
    assert found("Bc", 1 / 1024, scale=1024.0) == ["still_scaled"]
    assert found("Bs", 1 / 1024, scale=1024.0) == ["still_scaled"]
    assert found("Bc", 1.0, scale=1024.0) == []
    assert found("B", 0.25, scale=1024.0) == []
    # The threshold was multiplied too.
    scaled = GradientOperation("clip", call=call(max_norm=1024.0, norm=9999.0))
    facts = Facts(1.0, 1.0, [STEPS["B"], scaled], parameters=MINE, scale=1024.0)
    assert list(judged(facts)) == []


def test_coefficients_within_the_step():
    assert found("B", 1.0, known=(2e6, 1.0)) == ["tiny_coefficient"]
    assert found("B", 1.0, known=(9e5, 1.0)) == []
    assert found("B", 0.0, known=(math.inf, 1.0)) == []


def test_closures():
    assert found("cB", 5.0, closure=True) == ["before_backward"]
    assert found("Bc", 1.0, closure=True) == []


def test_calls_for_parts_of_the_parameters():
    half = [GradientOperation("clip", call=call([one])) for one in MINE]
    happened = [STEPS["B"], *half]
    assert list(judged(Facts(math.sqrt(2), 1.0, happened, parameters=MINE))) == []
    assert [kind for kind, _ in judged(Facts(1.5, 1.0, happened, parameters=MINE))] == ["not_clipped"]
