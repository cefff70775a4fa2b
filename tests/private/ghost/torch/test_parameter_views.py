"""Views and casts of parameters are followed to the parameter."""

import pytest
import torch
import torch.nn.functional as F

from tapped_torch import distance, gradients_by_loop, tapped_gradients

DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def checked(loss, shape=(6, 4), inputs=(5, 4)):
    """Return the uses of the parameter of a loss, after a look at the gradients."""
    torch.manual_seed(0)
    params, x = {"w": torch.randn(shape, dtype=DTYPE)}, torch.randn(3, *inputs, dtype=DTYPE)
    uses, result, found = tapped_gradients(loss, params, x)
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10
    assert result.untapped == {}
    assert uses["w"].reason == ""
    return uses["w"].uses


FOLLOWED = {
    "t": lambda w, x: x @ w.t(),
    "T": lambda w, x: x @ w.T,
    "mT": lambda w, x: x @ w.mT,
    "mH": lambda w, x: x @ w.mH,
    "transpose": lambda w, x: x @ torch.transpose(w, 0, 1),
    "permute": lambda w, x: x @ w.permute(1, 0),
    "movedim": lambda w, x: x @ w.movedim(0, 1),
    "swapaxes": lambda w, x: x @ torch.swapaxes(w, 0, 1),
    "reshape": lambda w, x: F.linear(x, w.reshape(2, 12).reshape(6, 4)),
    "view": lambda w, x: F.linear(x, w.view(-1).view(6, 4)),
    "unflatten": lambda w, x: x @ w.unflatten(0, (3, 2)).mT[0],
    "flatten": lambda w, x: F.linear(x, w.view(3, 2, 4).flatten(0, 1)),
    "unsqueeze": lambda w, x: F.linear(x, w.unsqueeze(0).squeeze(0)),
    "narrow": lambda w, x: F.linear(x, w.narrow(0, 1, 3)),
    "select": lambda w, x: x @ w.select(0, 2),
    "slice": lambda w, x: F.linear(x, w[1:3]),
    "slices": lambda w, x: F.linear(x[:, :2], w[1:3, :2]),
    "none": lambda w, x: x @ w[None].mT,
    "dots": lambda w, x: x @ w[..., 1:, :].mT,
    "contiguous": lambda w, x: F.linear(x, w.contiguous()),
    "clone": lambda w, x: F.linear(x, w.clone()),
    "to the kind of another": lambda w, x: F.linear(x, w.type_as(w)),
    "keywords": lambda w, x: x @ w.transpose(dim0=0, dim1=1),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_views_are_followed(name):
    uses = checked(lambda p, x: last(FOLLOWED[name](p["w"], x)))
    assert [use.terms for use in uses] == [5]


SEVERAL = {
    "chunk": lambda w: w.chunk(3),
    "split": lambda w: w.split([1, 2, 3]),
    "tensor_split": lambda w: torch.tensor_split(w, 3),
    "unbind": lambda w: [row[None] for row in w.unbind()],
    "iteration": lambda w: [row[None] for row in w],
    "unpacking": lambda w: [*w.view(3, 2, 4)],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_parts_are_separate(name):
    loss = lambda p, x: sum(last(F.linear(x, part)) * (i + 1) for i, part in enumerate(SEVERAL[name](p["w"])))
    uses = checked(loss)
    assert sum(use.place.box[0] for use in uses) == 6
    assert len({use.place for use in uses}) == len(uses)


def test_a_view_is_made_once():
    views = []

    def loss(p, x):
        views.append(p["w"].t())
        views.append(p["w"].t())
        return last(x @ views[-1])

    checked(lambda p, x: loss(p, x))
    assert views[0] is views[1]


def test_views_of_a_parameter_that_is_not_contiguous():
    torch.manual_seed(0)
    params, x = {"w": torch.randn(4, 6, dtype=DTYPE).t()}, torch.randn(3, 5, 4, dtype=DTYPE)
    loss = lambda p, x: last(F.linear(x, p["w"][:3])) + last(x @ p["w"].t()[:, 3:])
    uses, _, found = tapped_gradients(loss, params, x)
    assert [use.place.start for use in uses["w"].uses] == [(0, 0), (3, 0)]
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_no_gradient_is_rounded_by_a_cast():
    params, x = {"w": torch.ones(2, 3, dtype=DTYPE)}, torch.full((4, 3), 1 + 2.0**-40, dtype=DTYPE)
    _, _, found = tapped_gradients(lambda p, x: F.linear(x, p["w"].float().double()).sum(), params, x)
    assert torch.equal(found["w"], torch.full((4, 2, 3), 1 + 2.0**-40, dtype=DTYPE))


def test_factors_of_a_cast_parameter_keep_the_dtype_of_the_product():
    params, x = {"w": torch.ones(2, 3)}, torch.ones(4, 3, dtype=torch.bfloat16)
    _, result, _ = tapped_gradients(lambda p, x: F.linear(x, p["w"].bfloat16()).float().sum(), params, x)
    ((term,),) = (part.terms for part in result.gradients[0])
    assert (term.left.dtype, term.right.dtype) == (torch.bfloat16, torch.bfloat16)


def test_autocast_keeps_the_rounded_input():
    def loss(p, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, p["w"]).float().sum()

    params, x = {"w": torch.ones(2, 3)}, torch.full((4, 3), 1 + 2.0**-12)
    _, result, found = tapped_gradients(loss, params, x)
    ((term,),) = (part.terms for part in result.gradients[0])
    assert term.right.dtype == torch.bfloat16
    assert torch.equal(found["w"], torch.ones(4, 2, 3, dtype=torch.float64))


def test_integers_from_parameters_are_constants():
    def loss(p, x):
        rows = p["w"].to(torch.int64)
        return last(F.linear(x, p["w"])) * rows.abs().sum()

    checked(loss)


def test_complex_casts_are_not_followed():
    loss = lambda p, x: last((x.cfloat() @ p["w"].to(torch.complex64).mT).abs()) + last(x @ p["w"].mT)
    params, x = {"w": torch.arange(6.0).reshape(2, 3)}, torch.linspace(-1, 1, 12).reshape(4, 3)
    uses, _, found = tapped_gradients(loss, params, x)
    assert uses["w"].reason == "torch.Tensor.to"
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-6
