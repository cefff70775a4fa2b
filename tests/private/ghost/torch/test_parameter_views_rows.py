"""Rows that indices pick come with the indices."""

import pytest
import torch
import torch.nn.functional as F

from tapped_torch import distance, gradients_by_loop, tapped_gradients

DTYPE = torch.float64
TOKENS = torch.tensor([[0, 2, 2, 5], [6, 1, 0, 5], [3, 3, 3, 3]])


def last(y):
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def table(*shape):
    return {"w": torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(0))}


PICKED = {
    "embedding": (lambda w, t: F.embedding(t, w), (7, 3), 4),
    "embedding with padding": (lambda w, t: F.embedding(t, w, padding_idx=5), (7, 3), 4),
    "embedding with padding from the end": (lambda w, t: F.embedding(t, w, -2), (7, 3), 4),
    "embedding of a matrix": (lambda w, t: F.embedding(t.reshape(2, 2), w), (7, 3), 4),
    "embedding of one": (lambda w, t: F.embedding(t[0], w), (7, 3), 1),
    "positions": (lambda w, t: F.embedding(torch.arange(4), w) * t[:, None], (7, 3), 4),
    "indexing": (lambda w, t: w[t], (7, 3), 4),
    "indexing from the end": (lambda w, t: w[t - 7], (7, 3), 4),
    "indexing of numbers": (lambda w, t: w[t], (7,), 4),
    "indexing of matrices": (lambda w, t: w[t], (7, 2, 3), 4),
    "index_select": (lambda w, t: w.index_select(0, t), (7, 3), 4),
    "rows of a slice": (lambda w, t: w[1:, :2][t], (8, 3), 4),
}


@pytest.mark.parametrize("name", PICKED)
def test_rows_come_with_their_indices(name):
    pick, shape, terms = PICKED[name]
    loss = lambda p, t: last(pick(p["w"], t))
    uses, result, found = tapped_gradients(loss, table(*shape), TOKENS)
    assert [(use.terms, use.embedding) for use in uses["w"].uses] == [(terms, True)]
    (part,) = result.gradients[0]
    assert part.terms[0].indices.shape == (3, terms)
    assert part.terms[0].indices.min() >= 0
    assert distance(found, gradients_by_loop(loss, table(*shape), TOKENS)) < 1e-10


def test_padding_gets_no_gradient():
    _, result, _ = tapped_gradients(lambda p, t: last(F.embedding(t, p["w"], padding_idx=5)), table(7, 3), TOKENS)
    (part,) = result.gradients[0]
    indices, right = part.terms[0]
    assert not right[indices == 5].any()
    assert right[indices != 5].all()


@pytest.mark.parametrize(
    "pick",
    [
        lambda w, t: F.embedding(t, w, padding_idx=5),
        lambda w, t: F.embedding(t, w, -2, scale_grad_by_freq=True),
        lambda w, t: F.embedding(t, 2 * w, padding_idx=5),
        lambda w, t: F.embedding(t, w, padding_idx=5) + w.norm(),
        lambda w, t: torch.embedding(w, t, 5),
    ],
)
@pytest.mark.parametrize("only", [None, ()], ids=["tapped", "made"])
def test_padding_gets_no_gradient_where_each_example_has_its_own_table(pick, only):
    loss = lambda p, t: last(pick(p["w"], t))
    _, _, found = tapped_gradients(loss, table(7, 3), TOKENS, only=only)
    assert distance(found, gradients_by_loop(loss, table(7, 3), TOKENS)) < 1e-10


def test_gradients_that_autograd_makes_sparse_are_the_same():
    losses = [lambda p, t, s=s: last(F.embedding(t, p["w"], sparse=s)) for s in (True, False)]
    uses, _, found = tapped_gradients(losses[0], table(7, 3), TOKENS)
    assert uses["w"].reason == ""
    assert distance(found, gradients_by_loop(losses[1], table(7, 3), TOKENS)) < 1e-10


@pytest.mark.parametrize(
    ("pick", "reason"),
    [
        (lambda w, t: w.t()[t % 3], "indexing of columns or of a view that is not a box of the parameter"),
        (lambda w, t: w[:, t % 3], "torch.Tensor.__getitem__"),
        (lambda w, t: w[[0, 2]], "torch.Tensor.__getitem__"),
        (lambda w, t: F.embedding(t, w, scale_grad_by_freq=True), "embedding with scale_grad_by_freq"),
        (lambda w, t: torch.gather(w[:4], 0, t[:, None] % 4), "torch.gather"),
    ],
)
def test_other_picks_are_made(pick, reason):
    loss = lambda p, t: last(pick(p["w"], t))
    uses, _, found = tapped_gradients(loss, table(7, 3), TOKENS)
    assert uses["w"].reason == reason
    if "freq" not in reason:
        assert distance(found, gradients_by_loop(loss, table(7, 3), TOKENS)) < 1e-10
