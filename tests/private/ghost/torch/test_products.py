"""Products with parameters come in factors whose products are the gradients."""

import pytest
import torch
import torch.nn.functional as F

from tapped_torch import distance, gradients_by_loop, tapped_gradients

DTYPE = torch.float64


def tensor(*shape, seed=0):
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed + sum(shape)))


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


# Each: the loss of w and x, the shapes of w and x, and the positions in which w is used.
PRODUCTS = {
    "linear": (lambda w, x: F.linear(x, w), (4, 3), (3,), [1]),
    "linear at positions": (lambda w, x: F.linear(x, w), (4, 3), (5, 2, 3), [10]),
    "linear with a vector": (lambda w, x: F.linear(x, w), (3,), (5, 3), [5]),
    "square": (lambda w, x: F.linear(F.linear(x, w), w), (3, 3), (5, 3), [5, 5]),
    "square, then transposed": (lambda w, x: F.linear(x, w) @ w.t(), (3, 3), (5, 3), [5, 5]),
    "square, from both sides": (lambda w, x: w @ (x @ w), (3, 3), (3, 3), [3, 3]),
    "x @ w": (lambda w, x: x @ w, (3, 4), (5, 3), [5]),
    "x @ w, x a vector": (lambda w, x: x @ w, (3, 4), (3,), [1]),
    "x @ w, w a vector": (lambda w, x: x @ w, (3,), (5, 3), [5]),
    "x @ w, vectors": (lambda w, x: x @ w, (3,), (3,), [1]),
    "w @ x": (lambda w, x: w @ x, (4, 3), (3, 5), [5]),
    "w @ x, x a vector": (lambda w, x: w @ x, (4, 3), (3,), [1]),
    "w @ x, w a vector": (lambda w, x: w @ x, (3,), (3, 5), [5]),
    "w @ x of more axes": (lambda w, x: w @ x, (4, 3), (2, 3, 5), [10]),
    "matrices of heads": (lambda w, x: x @ w, (2, 3, 4), (2, 5, 3), [5]),
    "matrices of heads, one input": (lambda w, x: x @ w, (2, 3, 4), (5, 3), [5]),
    "matrices of heads, an input stretched": (lambda w, x: x @ w, (2, 3, 4), (1, 5, 3), [5]),
    "more heads in the input": (lambda w, x: x @ w, (2, 3, 4), (6, 2, 5, 3), [30]),
    "mm": (lambda w, x: torch.mm(x, w), (3, 4), (5, 3), [5]),
    "mm from the left": (lambda w, x: w.mm(x), (4, 3), (3, 5), [5]),
    "mv": (lambda w, x: w.mv(x), (4, 3), (3,), [1]),
    "dot": (lambda w, x: torch.dot(w, x), (3,), (3,), [1]),
    "bmm": (lambda w, x: torch.bmm(x, w), (2, 3, 4), (2, 5, 3), [5]),
    "addmm": (lambda w, x: torch.addmm(x[:, :1], x, w, beta=2, alpha=3), (3, 4), (5, 3), [5]),
    "baddbmm": (lambda w, x: torch.baddbmm(x[..., :1], x, w, beta=0), (2, 3, 4), (2, 5, 3), [5]),
    "addmv": (lambda w, x: torch.addmv(x[:4], w, x), (4, 5), (5,), [1]),
    "einsum": (lambda w, x: torch.einsum("ti,oi->to", x, w), (4, 3), (5, 3), [5]),
    "einsum, parameter first": (lambda w, x: torch.einsum("oi, ti -> ot", w, x), (4, 3), (5, 3), [5]),
    "einsum of heads": (lambda w, x: torch.einsum("td,dhk->htk", x, w), (3, 2, 4), (5, 3), [5]),
    "einsum back from heads": (lambda w, x: torch.einsum("htk,hkd->td", x, w), (2, 4, 3), (2, 5, 4), [5]),
    "einsum of blocks": (lambda w, x: torch.einsum("gti,goi->gto", x, w), (2, 4, 3), (2, 5, 3), [5]),
    "einsum with a sum over the input": (lambda w, x: torch.einsum("ti,oi->o", x, w), (4, 3), (5, 3), [1]),
    "einsum with dots": (lambda w, x: torch.einsum("...i,io", x, w), (3, 4), (2, 5, 3), [10]),
    "einsum, no result named": (lambda w, x: torch.einsum("ti,io", x, w), (3, 4), (5, 3), [5]),
    "tensordot": (lambda w, x: torch.tensordot(x, w, 1), (3, 4), (5, 3), [5]),
    "tensordot of two axes": (lambda w, x: torch.tensordot(w, x, ([0, 2], [1, 2])), (3, 4, 2), (5, 3, 2), [5]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_come_in_factors(name):
    product, shape, shape_of_x, positions = PRODUCTS[name]
    params, x = {"w": tensor(*shape)}, tensor(4, *shape_of_x)
    loss = lambda p, x: last(product(p["w"], x))
    uses, result, found = tapped_gradients(loss, params, x)
    assert uses["w"].reason == ""
    assert [use.terms for use in uses["w"].uses] == positions
    assert not any(use.embedding for use in uses["w"].uses)
    assert result.untapped == {}
    assert len(result.gradients[0]) == 1
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_the_comparison_sees_a_wrong_gradient():
    expected = {"w": torch.tensor([[1.0, 2.0]])}
    assert distance({"w": torch.tensor([[1.0, 2.5]])}, expected) == 0.25
    assert distance({"w": torch.tensor([[1.0, 2.0]])}, expected) == 0
