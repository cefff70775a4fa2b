"""Terms of gradients: which axes mean what, parts that overlap, and the gradients that terms add up to."""

import pytest
import torch

from gradclip._src.private.ghost.records import Dense, Embedding, MatrixPlace, PlacedTerms
from gradclip._src.private.ghost.torch.layout import layout_of
from gradclip._src.private.ghost.torch.run import Product, Term, dense, materialized, overlap, parts_of, roles_of


def place(start, stop, *, columns_first=False):
    view = tuple(b - a for a, b in zip(start, stop, strict=True))
    return MatrixPlace(start, stop, view, (), (1,) if columns_first else (0,), (0,) if columns_first else (1,))


def test_the_axes_of_a_batched_product():
    product = Product(("head", "t", "in"), ("head", "in", "out"), ("head", "t", "out"))
    roles = roles_of(product, layout_of((2, 3, 4)))
    assert (roles.place.shape, roles.swapped, roles.summed, roles.per_position) == ((2, 3, 4), False, (), 8)
    x, e = torch.arange(30.0).reshape(1, 2, 5, 3), torch.arange(40.0).reshape(1, 2, 5, 4)
    assert roles.positions(e) == 5
    found = dense(roles, x, e, 5)
    assert torch.equal(found.left, x)
    assert torch.equal(found.right, e)


NOT_OUTER = {
    "an axis of the parameter that is summed": Product(("t",), ("in", "out"), ("t", "out")),
    "a diagonal": Product(("t", "in"), ("in", "in"), ("t",)),
    "a result from nowhere": Product(("t", "in"), ("in", "out"), ("t", "out", "new")),
}


@pytest.mark.parametrize("product", NOT_OUTER.values(), ids=NOT_OUTER)
def test_other_sums_are_no_outer_products(product):
    assert roles_of(product, layout_of((3, 3))) is None


def test_terms_of_one_place_are_one_part():
    one, other = place((0, 0), (2, 3)), place((2, 0), (4, 3))
    terms = [Dense(torch.ones(1), torch.ones(1)) for _ in range(3)]
    parts, overlapping = parts_of([(one, terms[0]), (other, terms[1]), (one, terms[2])])
    assert overlapping == ""
    assert [part.place for part in parts] == [one, other]
    assert parts[0].terms[1] is terms[2]


@pytest.mark.parametrize(
    ("places", "overlapping"),
    [
        ([place((0, 0), (2, 3)), place((2, 0), (4, 3))], False),
        ([place((0, 0), (2, 3)), place((1, 0), (4, 3))], True),
        ([place((0, 0), (2, 3)), place((1, 3), (4, 4))], False),
        ([place((0, 0), (2, 3)), place((0, 0), (2, 3), columns_first=True)], True),
        ([], False),
    ],
)
def test_boxes_overlap_along_every_axis(places, overlapping):
    assert bool(overlap(places)) == overlapping


def test_a_sum_over_parts():
    left, right = torch.tensor([[[[1.0, 2.0], [0.0, 1.0]]]]), torch.tensor([[[[3.0], [5.0]]]])
    rows = Embedding(torch.tensor([[1, 1, 0]]), torch.tensor([[[1.0], [2.0], [4.0]]]))
    parts = [PlacedTerms(place((0, 1), (2, 2)), [Dense(left, right), rows]), PlacedTerms(place((2, 0), (3, 2)), [])]
    # 1 * 3 + 0 * 5 + 4 in the first row, 2 * 3 + 1 * 5 + (1 + 2) in the second.
    assert materialized(parts, torch.zeros(1, 3, 2)).tolist() == [[[0.0, 7.0], [0.0, 14.0], [0.0, 0.0]]]


def test_columns_before_rows():
    swapped = MatrixPlace((0, 0), (2, 3), (2, 3), (), (1,), (0,))
    left, right = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[10.0, 1.0]]]])
    made = materialized([PlacedTerms(swapped, [Dense(left, right)])], torch.zeros(1, 2, 3))
    assert made.tolist() == [[[10.0, 20.0, 30.0], [1.0, 2.0, 3.0]]]


def test_inputs_must_not_change():
    x = torch.ones(3)
    term = Term(None, 1, "linear", 0, lambda e: e, x, x._version)
    term.check()
    x.add_(1)
    with pytest.raises(RuntimeError, match="the input of linear has been modified by an in-place operation"):
        term.check()
