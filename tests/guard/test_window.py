"""What the witnesses show of what happened between two steps."""

import math

import pytest
import torch

from gradclip._src.guard.window import _MOST_EVENTS, Event, Window, _witnesses, fetched, read
from gradclip._src.step.heard import ClipCall

CALL = ClipCall("clip_grad_norm_", [], 1, 1, 1.0, 5.0)


def story(*events):
    """Return what happened, each as a letter, from kinds of events and norms."""
    rows = [list(norms) for _, *norms in events]
    made = [Event(kind, [], CALL if kind == "clip" else None) for kind, *_ in events]
    steps = read(made, rows, [None] * len(rows))
    letters = {"backward": "b", "clip": "c", "scaled": "s", "partly": "p"}
    return "".join(letters[one.kind].upper() if one.fresh else letters[one.kind] for one in steps)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("before", None, None), ("after", 3, 4), ("end", 3, 4)], "B"),
        ([("before", 0, 0), ("after", 3, 4), ("clip", 0.6, 0.8), ("end", 0.6, 0.8)], "Bc"),
        ([("before", None, None), ("after", 3, 4), ("end", 0.6, 0.8)], "Bs"),
        ([("before", None, None), ("after", 3, 4), ("end", 0.6, 4)], "Bp"),
        ([("before", None, None), ("after", 3, 4), ("end", 0.6, 0.7)], "B"),
        ([("before", None, None), ("after", 3, 4), ("before", 0.6, 0.8), ("after", 2, 2), ("end", 2, 2)], "Bsb"),
        ([("step", 3, 4), ("left", 0.6, 0.8), ("before", None, None), ("after", 1, 1), ("end", 1, 1)], "sB"),
        ([("step", 3, 4), ("left", 0, 0), ("before", 0, 0), ("after", 1, 1), ("end", 1, 1)], "B"),
        ([("step", 3, 4), ("left", 3, 4), ("before", 3, 4), ("after", 1, None), ("end", 1, 4)], "b"),
        ([("before", None, None), ("after", 3, 4), ("end", math.nan, math.nan)], "B"),
        ([("before", None), ("after", 3), ("end", 0.6)], "B"),  # one norm alone says too little
    ],
)
def test_what_norms_say(events, expected):
    assert story(*events) == expected


def test_numbers_are_fetched_together():
    scalars = [torch.tensor(3.0), None, torch.tensor(2.5, dtype=torch.float64)]
    assert fetched([scalars[:2], scalars[2:]]) == [[3.0, None], [2.5]]
    assert fetched([]) == []


def test_witnesses_are_small_and_from_all_parts():
    sizes = [9, 1, 7, 2, 8, 3, 6, 4, 9, 5, 7, 6, 5, 8, 4, 9]
    chosen = _witnesses([torch.zeros(size, requires_grad=True) for size in sizes])
    assert [one.numel() for one in chosen] == [1, 2, 3, 4, 5, 6, 5, 4]
    frozen = torch.zeros(1)
    assert _witnesses([frozen]) == []


def test_a_window_leaves_nothing_behind():
    weight = torch.nn.Parameter(torch.ones(2))
    window = Window.opened([weight], after_step=True)
    weight.sum().backward()
    window.clipped(CALL, {id(weight)})
    weight.sum().backward()
    assert [one.kind for one in window.steps([])] == ["backward", "clip", "backward"]
    window.close()
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks
    before = len(window.events)
    weight.sum().backward()
    assert len(window.events) == before


def test_an_optimizer_that_never_steps_is_watched_no_more():
    weight = torch.nn.Parameter(torch.ones(1))
    window = Window.opened([weight], after_step=False)
    for _ in range(_MOST_EVENTS // 2 + 10):
        weight.backward(torch.ones(1))
    assert len(window.events) <= _MOST_EVENTS + 3
    assert not weight._backward_hooks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_of_any_dtype(dtype):
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    other = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    window = Window.opened([weight, other], after_step=False)
    (weight.sum() + other.sum()).abs().backward()
    for one in (weight, other):
        one.grad.mul_(0.25)
    assert [(one.kind, one.ratio) for one in window.steps([])] == [("backward", 1.0), ("scaled", 0.25)]
    window.close()
