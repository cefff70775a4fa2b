"""The attack by a loss with a kink: its sums, sizes and steps by hand."""

from fractions import Fraction

import pytest
import torch

import gradclip
from gradclip.per_example import kinks


def clipped(max_norm=1.0, **settings):
    return gradclip.clipped_grad(lambda w, x: (w * x).sum(), max_norm, **settings)


def test_the_threshold_is_that_of_all_layers():
    assert kinks.threshold_of(clipped(2.5)) == 2.5
    assert kinks.threshold_of(clipped({"w": 3.0, "b": 4.0})) == 5.0


def test_a_step_is_that_of_the_grid():
    assert kinks.step_of(clipped(2.0)) == 1
    assert kinks.step_of(clipped(2.0, grid=16)) == Fraction(1, 8)


@pytest.mark.parametrize(
    ("settings", "count", "expected"),
    [({}, 16, [2, 4, 8, 16]), ({}, 3, [2, 3]), ({"pad_to": 6}, 16, [2, 4, 6]), ({}, 1, [1])],
)
def test_batches_of_several_sizes_are_tried(settings, count, expected):
    assert kinks.sizes(clipped(**settings), count) == expected


def test_gradients_are_those_that_are_given():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    function = kinks.of_gradients(clipped(), lambda x: torch.zeros(x.shape[1:]))
    assert function(rows).tolist() == pytest.approx([0.9, 1.2])


def test_the_kinked_loss_has_the_gradient_of_its_side():
    x, w = torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]]), torch.tensor([1.0, 1.0])
    result, aux = kinks.kinked(clipped())(w, x, torch.tensor([0.0, 9.0, 14.0]))
    assert result.tolist() == pytest.approx([0.6 - 0.3, 0.8 - 0.4])
    assert aux.aux.tolist() == pytest.approx([7.0, 0.7, 14.0])
