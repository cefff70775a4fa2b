"""The attack by a loss with a kink: its sums, sizes and steps by hand."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.private.audit import attacks


def clipped(max_norm=1.0, **settings):
    return gradclip.clipped_grad(lambda w, x: (w * x).sum(), max_norm, **settings)


def test_the_threshold_is_that_of_all_layers():
    assert attacks.threshold_of(clipped(2.5)) == 2.5
    assert attacks.threshold_of(clipped({"w": 3.0, "b": 4.0})) == 5.0


def test_a_step_is_that_of_the_grid():
    assert attacks.step_of(clipped(2.0)) == 1
    assert attacks.step_of(clipped(2.0, grid=16)) == Fraction(1, 8)


@pytest.mark.parametrize(
    ("settings", "count", "expected"),
    [({}, 16, [2, 4, 8, 16]), ({}, 3, [2, 3]), ({"pad_to": 6}, 16, [2, 4, 6]), ({}, 1, [1])],
)
def test_batches_of_several_sizes_are_tried(settings, count, expected):
    assert attacks.sizes(clipped(**settings), count) == expected


def test_what_is_tried():
    removed, shuffled, masked = attacks.REMOVING
    assert [*attacks.combinations(clipped(), 3, "add_or_remove_one")] == [
        (2, removed, ()),
        *((3, name, outputs) for outputs in ((), (10,)) for name in (removed, shuffled, masked)),
    ]
    assert [*attacks.combinations(clipped(), 2, "zero_out")] == [(2, "made zeros", ()), (2, "made zeros", (10,))]


def test_gradients_are_those_that_are_given():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    function = attacks.of_gradients(clipped(), lambda x: torch.zeros(x.shape[1:]))
    assert function(rows).tolist() == pytest.approx([0.9, 1.2])


def test_the_kinked_loss_has_the_gradient_of_its_side():
    x, w = torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]]), torch.tensor([1.0, 1.0])
    result, aux = attacks.kinked(clipped())(w, x, torch.tensor([0.0, 9.0, 14.0]))
    assert result.tolist() == pytest.approx([0.6 - 0.3, 0.8 - 0.4])
    assert aux.aux.tolist() == pytest.approx([7.0, 0.7, 14.0])


def test_a_kink_of_several_predictions():
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    result, aux = attacks.kinked(clipped(2.0))(w, x, torch.tensor([[0.0, 9.0]]))
    torch.testing.assert_close(result, torch.tensor([[3.0, -3.0], [4.0, -4.0]]) * (2.0 / 50**0.5))
    assert aux.aux.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("name", "kept", "order", "rows"),
    [
        ("masked out", [1, 1, 0, 1], [0, 1, 2, 3], [10, 11, 12, 13]),
        ("made zeros", [1, 1, 1, 1], [0, 1, 2, 3], [10, 11, 0, 13]),
        ("removed", [1, 1, 1], [0, 1, 3], [10, 11, 13]),
        ("removed and the rest shuffled", [1, 1, 1], [1, 0, 3], [11, 10, 13]),
    ],
)
def test_how_a_batch_changes(name, kept, order, rows):
    class Swap:
        permutation = staticmethod(lambda order: order[[1, 0, 2]])

    change = attacks.CHANGES[name](4, 2, Swap)
    assert change.counted.tolist() == kept
    assert change.order.tolist() == order
    assert change.of(np.arange(10, 14)).tolist() == rows


@pytest.mark.parametrize("outputs", [(), (3,)])
@pytest.mark.parametrize("place", ["removed", "removed and the rest shuffled"])
def test_sums_that_depend_on_places_are_found(outputs, place):
    """The function rounds a prediction up at even places, and down at odd ones."""

    def call(w, x, y, mask):
        exact = (x.astype(np.float64) @ w).reshape(y.shape)
        near = exact.astype(np.float32)
        up = (np.arange(len(x)) % 2 == 0).reshape(-1, *[1] * len(outputs))
        predicted = np.nextafter(near, np.where(up, np.inf, -np.inf).astype(np.float32))
        signs = np.sign(predicted - y) * mask.reshape(up.shape)
        gradients = np.einsum("nf,no->nfo", x, signs.reshape(len(x), -1))
        norms = np.linalg.norm(gradients, axis=(1, 2), keepdims=True)
        return [(gradients / np.maximum(norms, 1e-30)).sum(0).astype(np.float64).ravel()], predicted

    attack = attacks.Kinks(call, np.dtype("float32"), 1.0, outputs)
    rng = np.random.default_rng(0)
    distance = lambda name: max(np.linalg.norm(a[0] - b[0]) for a, b in attack.tried(9, name, rng))
    assert distance("masked out") == pytest.approx(1.0)
    assert distance(place) > 3
