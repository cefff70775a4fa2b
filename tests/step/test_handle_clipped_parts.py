"""What a step has clipped, by parts."""

import math

import pytest
import torch

import gradclip
from gradclip._src.step.handle import PartsWatched, StepPart, left_of_all

FOLLOWS = gradclip.AdaptiveThreshold(skip_above=4.0)


@pytest.mark.parametrize(
    ("norm", "max_norm", "blanks", "clipped", "skipped", "left"),
    [
        (1.0, 2.0, False, False, False, 1.0),
        (2.0, 2.0, False, False, False, 2.0),
        (3.0, 2.0, False, True, False, 2.0),
        (3.0, math.inf, False, False, False, 3.0),
        (8.0, FOLLOWS, False, True, False, 2.0),
        (9.0, FOLLOWS, False, False, True, 0.0),
        (math.inf, 2.0, False, False, False, math.inf),
        (math.inf, 2.0, True, False, True, 0.0),
        (math.inf, FOLLOWS, False, False, False, math.inf),
    ],
)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_one_part(norm, max_norm, blanks, clipped, skipped, left, kind):
    part = StepPart.of(torch.tensor(norm), max_norm, kind(2.0 if max_norm is FOLLOWS else max_norm))
    assert tuple(map(bool, part.shown(blanks=blanks))) == (clipped, skipped)
    assert part.left(blanks=blanks) == left


@pytest.mark.parametrize(("order", "left"), [(1, 7.0), (2, 5.0), (math.inf, 4.0)])
@pytest.mark.parametrize("scale", [1e30, 1.0, 1e-30, 0.0])
def test_parts_together(order, left, scale):
    parts = [StepPart(torch.tensor(norm * scale), c * scale, math.inf) for norm, c in ((3.0, 9.0), (8.0, 4.0))]
    assert float(left_of_all(parts, order, blanks=False)) == pytest.approx(left * scale)


def test_parts_that_are_not_finite():
    parts = [StepPart(torch.tensor(norm), 1.0, math.inf) for norm in (math.nan, 0.5)]
    assert left_of_all(parts, 2.0, blanks=False).isnan()
    assert left_of_all(parts, 2.0, blanks=True) == 0.5


@pytest.mark.parametrize("common", [True, False])
def test_a_call_is_taken_in_once_for_each_part(common):
    body, head = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    body.grad, head.grad = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    groups = [{"params": [body], **({} if common else {"max_norm": 1.0})}, {"params": [head], "max_norm": None}]
    watched = PartsWatched(monitor := gradclip.Monitor(), common=common)
    gradclip.clip_grad_norm_(groups, 1.0, monitor=watched)
    assert [(float(part.norm), part.threshold) for part in watched.parts] == [(5.0, 1.0), (10.0, math.inf)]
    assert (monitor.steps, len(monitor.groups)) == (1, 1 if common else 2)
