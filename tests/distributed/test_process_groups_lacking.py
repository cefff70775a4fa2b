"""A process that lacks a gradient has something without elements in its place."""

from functools import partial
from types import SimpleNamespace

import torch

from gradclip._src.backends.torch.distributed import nothing_like
from gradclip._src.distributed.process_groups import filled_up
from gradclip._src.passed.parameters import ParameterList

ROWS = partial(nothing_like, shape=lambda part: (part.shape[0], 0), device=torch.device("cpu"))


def test_missing_gradients_are_filled_and_others_kept():
    p, q = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64)), torch.nn.Parameter(torch.ones(4))
    q.grad = torch.ones(4)
    first, second, again = filled_up(ParameterList.of([p, q, p]), ROWS).gradients
    assert first.shape == (2, 0)
    assert first.dtype == torch.float64
    assert second is q.grad
    assert again is first
    assert p.grad is None


def test_lists_without_gaps_stay_as_they_are():
    q = torch.nn.Parameter(torch.ones(4))
    q.grad = torch.ones(4)
    params = ParameterList.of([q])
    assert filled_up(params, ROWS) is params


def test_parameters_that_are_no_tensors_get_one_on_the_device():
    (made,) = filled_up(ParameterList.of([SimpleNamespace(grad=None)]), ROWS).gradients
    assert made.shape == (0,)
