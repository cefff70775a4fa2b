"""Products for norms and sums of factors, in each framework, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from factors import PRODUCTS
from gradclip._src.private.ghost.records import Dense, Embedding

RNG = np.random.default_rng(0)
LEFT, RIGHT = RNG.standard_normal((4, 2, 3, 5)), RNG.standard_normal((4, 2, 3, 6))
INDICES = np.array([[0, 1, 0], [2, 2, 2], [0, 1, 2], [1, 0, 1]])
WEIGHTS = np.array([0.5, 0.0, 2.0, 1.0])
FRAMEWORKS = ["jax", "torch"]


@pytest.fixture(params=FRAMEWORKS)
def by(request):
    """Return the products of a framework, its arrays, and NumPy's float64 from its arrays."""
    made = PRODUCTS[request.param](concrete=True)
    with jax.enable_x64(True), made.precision():
        yield made, torch.tensor if request.param == "torch" else jnp.asarray


def check(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12, atol=1e-14)


def test_norms_of_products(by):
    products, make = by
    found = products.dense(Dense(make(LEFT), make(RIGHT)))
    check(found.square, (np.einsum("igtr,igtc->igrc", LEFT, RIGHT) ** 2).sum((1, 2, 3)))
    sizes = (np.linalg.norm(LEFT, axis=3) * np.linalg.norm(RIGHT, axis=3)).sum(2)
    check(found.size, (sizes**2).sum(1))


def dense_of(indices):
    return np.eye(5)[indices]


def test_norms_of_embeddings_and_of_both(by):
    products, make = by
    right = RIGHT[:, 0]
    rows = Embedding(make(INDICES), make(right))
    found = products.embedding(rows)
    gradient = np.einsum("itr,itc->irc", dense_of(INDICES), right)
    check(found.square, (gradient**2).sum((1, 2)))
    check(found.size, np.linalg.norm(right, axis=2).sum(1) ** 2)
    dense = Dense(make(LEFT[:, :1, :2]), make(RIGHT[:, 1:, :2]))
    other = np.einsum("itr,itc->irc", LEFT[:, 0, :2], RIGHT[:, 1, :2])
    check(products.between(dense, rows), (gradient * other).sum((1, 2)))


def test_terms_of_several_uses_are_joined(by):
    products, make = by
    one = Dense(make(LEFT), make(RIGHT))
    assert tuple(products.joined([one, one]).left.shape) == (4, 2, 6, 5)
    assert products.joined([one]) is one
    rows = Embedding(make(INDICES), make(RIGHT[:, 0]))
    assert tuple(products.joined_rows([rows, rows]).indices.shape) == (4, 6)
    assert products.joined_rows([rows]) is rows


def test_weighted_sums(by):
    products, make = by
    left = LEFT.copy()
    left[1] = np.nan  # of weight 0
    weights = products.taken(np.asarray(WEIGHTS))
    expected = np.einsum("i,igtr,igtc->grc", WEIGHTS, LEFT, RIGHT)
    check(products.sum_dense(Dense(make(left), make(RIGHT)), weights), expected)
    right = RIGHT[:, 0].copy()
    right[1] = np.inf
    found = products.sum_rows(Embedding(make(INDICES), make(right)), weights, 5)
    check(found, np.einsum("i,itr,itc->rc", WEIGHTS, dense_of(INDICES), RIGHT[:, 0])[None])
    check(products.sum_made(make(left[:, 0]), weights), np.einsum("i,itr->tr", WEIGHTS, LEFT[:, 0]))


def test_gradients_made_by_one_product(by):
    products, make = by
    found = products.multiplied(Dense(make(LEFT), make(RIGHT)))
    check(found, np.einsum("igtr,igtc->igrc", LEFT, RIGHT))
    halves = Dense(make(LEFT.astype(np.float16)), make(RIGHT.astype(np.float16)))
    assert str(products.multiplied(halves).dtype).endswith("float32")


def test_powers_of_two(by):
    products, make = by
    x = np.array([[3.0, -5.0], [0.0, 0.0], [np.nan, 1.0], [2.0**-1000, 0.0]])
    check(products.exponents(make(x)), [3.0, 0.0, 0.0, -999.0])
    check(products.exponents(make(x[:, 0])), [2.0, 0.0, 0.0, -999.0])
    large = products.times_power(make(np.array([[1.5], [1.5]])), products.taken(np.array([1020.0, -1020.0])))
    check(large, [[1.5 * 2.0**1020], [1.5 * 2.0**-1020]])


def test_parts_are_put_in_their_place(by):
    products, make = by
    part = np.arange(12.0).reshape(1, 4, 3)  # (blocks, rows, columns) of a view (3, 2, 2), columns first
    expected = part.reshape(2, 2, 3).transpose(2, 0, 1).reshape(3, 4)
    found = products.placed(make(part), (3, 2, 2), (1, 2, 0), (3, 4))
    check(found, expected)
    whole = np.zeros((5, 6))
    whole[1:4, 2:6] = expected
    check(products.put(found, (1, 2), (5, 6)), whole)
    assert products.put(found, (0, 0), (3, 4)) is found
    check(products.placed(make(part[:, :1, :1]), (), (), (1, 1)), part[0, :1, :1])


def test_sums_are_rounded_with_their_sign(by):
    products, make = by
    found = products.rounded(make(np.array([-1.0 / 3, 2.0**-140])), "float32")
    assert np.asarray(found).dtype == np.float32
    assert float(found[0]) == float(np.float32(-1.0 / 3))


def test_transposed_gradients_are_not_copied():
    products = PRODUCTS["torch"](concrete=True)
    x = torch.arange(24.0).reshape(2, 3, 4)
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    for order in ((0, 1, 2), (0, 2, 1)):
        rows = x.permute(order)
        assert (products.made(rows) == x.double().square().sum((1, 2))).all()
        assert (products.sum_made(rows, weights) == (2 * x[0] + x[1]).permute([i - 1 for i in order[1:]])).all()
