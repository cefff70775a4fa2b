"""Whole losses over a batch: the gradients are those of each example alone, and what is tapped is known before."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import gradclip
from gradclip import clipped_grad
from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch.taps import TorchTaps
from tapped_torch import distance, gradients_by_loop, tapped_gradients, with_aux

DTYPE = torch.float64


def tensor(*shape, seed=0):
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed + sum(shape)))


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def checked(loss, params, *batch, only=None):
    """Return the uses and the result of a loss, after a look at the gradients."""
    uses, result, found = tapped_gradients(loss, params, *batch, only=only)
    assert distance(found, gradients_by_loop(loss, params, *batch)) < 1e-10
    return uses, result


def of_module(module, *inputs):
    """Return the loss of a module, and its parameters in float64."""
    module.to(DTYPE)
    params = {name: x.detach().clone() for name, x in module.named_parameters()}
    return (lambda p, *x: last(torch.func.functional_call(module, p, x))), params


def test_a_perceptron_needs_no_gradient_of_a_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    loss, params = of_module(model)
    uses, result = checked(loss, params, tensor(5, 6, 3))
    assert {name: len(use.uses) for name, use in uses.items() if not use.reason} == {
        "0.weight": 1,
        "2.weight": 1,
        "4.weight": 1,
    }
    assert uses["0.bias"].reason == "bias of linear"
    assert uses["3.weight"].reason == "scale of layer_norm"
    rows = [params[name] for name in sorted(params)]
    assert all(isinstance(g, Made) == (x.ndim == 1) for g, x in zip(result.gradients, rows, strict=True))


@pytest.mark.parametrize("only", [[], ["w"], ["b"], ["w", "b"]])
def test_any_parameters_can_be_tapped(only):
    loss = lambda p, x: last(F.linear(x, p["w"], p["b"])) + last(p["b"])
    _, result = checked(loss, {"w": tensor(4, 3), "b": tensor(4)}, tensor(5, 2, 3), only=only)
    assert isinstance(result.gradients[1], Made) == ("w" not in only)
    assert result.untapped.keys() == ({0} if "b" in only else set())


def test_the_same_parameter_is_one_part_whatever_its_uses():
    params, x = {"w": tensor(3, 3)}, tensor(4, 5, 3)
    loss = lambda p, x: last(F.linear(x, p["w"])) + last(x @ p["w"].t() + torch.cos(x) @ p["w"])
    _, result = checked(loss, params, x)
    (part,) = result.gradients[0]
    assert [term.left.shape for term in part.terms] == [(4, 1, 5, 3)] * 3


def test_tied_embeddings_and_heads_are_one_part():
    params, tokens = {"table": tensor(7, 3)}, torch.tensor([[0, 2, 2], [6, 1, 0]])
    loss = lambda p, t: last(F.linear(torch.tanh(F.embedding(t, p["table"])), p["table"]))
    uses, result = checked(loss, params, tokens)
    assert [(use.operation, use.terms, use.embedding) for use in uses["table"].uses] == [
        ("embedding", 3, True),
        ("linear", 3, False),
    ]
    (part,) = result.gradients[0]
    assert [type(term).__name__ for term in part.terms] == ["Embedding", "Dense"]


ODD = {
    "a norm": lambda p, x: last(F.linear(x, p["w"])) + p["w"].norm(),
    "a norm of a view": lambda p, x: last(F.linear(x, p["w"].t())) + p["w"].t()[1].norm(),
    "a list": lambda p, x: last(torch.cat([p["w"], x])),
    "keyword": lambda p, x: last(F.linear(input=x, weight=p["w"])) + torch.sum(input=p["w"] ** 2),
    "in a transform": lambda p, x: torch.func.vmap(lambda row: last(p["w"] @ row))(x).sum(),
    "a derivative": lambda p, x: last(torch.func.grad(lambda z: last(F.linear(z, p["w"])))(x)),
    "a derivative by the parameter": lambda p, x: last(torch.func.grad(lambda w: last(F.linear(x, w)))(p["w"])),
    "both factors": lambda p, x: last(x @ p["w"] @ (p["w"] @ p["w"].t())),
    "every second row": lambda p, x: last(F.linear(x, p["w"][::2])),
    "stretched": lambda p, x: last(x @ p["w"].expand(2, 3, 3)),
    "a sum over elements": lambda p, x: last(torch.einsum("ti,oi->t", x, p["w"])),
    "parts that overlap": lambda p, x: last(x @ p["w"][:, :2]) + last(x @ p["w"][:, 1:]),
    "different matrices": lambda p, x: last(x @ p["w"]) + last(x[:1, :1] * (x.reshape(-1)[:9] @ p["w"].reshape(9))),
}


@pytest.mark.parametrize("name", ODD)
def test_other_operations_make_the_gradient_of_that_parameter_alone(name):
    loss = lambda p, x: ODD[name](p, x) + last(F.linear(x, p["other"]))
    params, x = {"w": tensor(3, 3), "other": tensor(2, 3)}, tensor(4, 5, 3)
    uses, result = checked(loss, params, x)
    assert uses["w"].reason != ""
    assert uses["other"].reason == ""
    checked(loss, params, x, only=[])
    _, result = checked(loss, params, x, only=["w", "other"])
    assert result.untapped == {1: uses["w"].reason}
    assert isinstance(result.gradients[1], Made)


CONSTANT = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "zeros_like": lambda w: torch.zeros_like(w) + 1,
    "new_ones": lambda w: w.new_ones(w.shape) * w.shape[0],
    "size": lambda w: torch.tensor(float(w.size(0) + w.dim() + len(w)), dtype=w.dtype),
    "integers": lambda w: w.to(torch.int64).sum().to(DTYPE),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_no_gradient_flows_through_constants(name):
    def loss(p, x):
        return last(F.linear(x, p["w"])) * CONSTANT[name](p["w"]).sum()

    uses, _ = checked(loss, {"w": tensor(2, 3)}, tensor(4, 5, 3))
    assert uses["w"].reason == ""


def test_no_gradient_flows_without_gradients():
    def loss(p, x):
        with torch.no_grad():
            scale, same = p["w"].norm() + F.linear(x, p["w"]).norm(), p["w"].contiguous()
        return scale * last(F.linear(x, same))

    uses, _ = checked(loss, {"w": tensor(2, 3)}, tensor(4, 5, 3))
    assert [use.terms for use in uses["w"].uses] == [5]


def test_unused_parameters_have_no_terms():
    loss = lambda p, x: last(x * p["scale"])
    _, result = checked(loss, {"w": tensor(2, 3), "scale": tensor(3)}, tensor(4, 3), only=["w"])
    ((term,),) = (part.terms for part in result.gradients[1])
    assert term.left.shape == (4, 1, 0, 6)
    _, result = checked(lambda p, x: last(x), {"w": tensor(2, 3)}, tensor(4, 3), only=[])
    assert result.gradients[0][0].terms[0].left.shape == (4, 1, 0, 6)


def test_products_whose_results_are_not_used_have_no_terms():
    loss = lambda p, x: last(F.linear(x, p["frozen"]).detach()) + last(x @ p["w"])
    _, result = checked(loss, {"w": tensor(3, 2), "frozen": tensor(2, 3)}, tensor(4, 3))
    assert result.gradients[0][0].terms[0].left.shape == (4, 1, 0, 6)


def test_inputs_without_positions_have_no_terms():
    checked(lambda p, x: last(F.linear(x, p["w"], p["b"])), {"w": tensor(2, 3), "b": tensor(2)}, tensor(4, 0, 3))


def test_parameters_can_be_returned():
    def loss(p, x):
        y = F.linear(x, p["w"])
        return last(y), {"w": p["w"], "y": y, "rows": p["w"].t()}

    params, x = {"w": tensor(2, 3)}, tensor(4, 3)
    _, result, _ = tapped_gradients(loss, params, x, has_aux=True)
    assert type(result.aux["w"]) is torch.Tensor
    assert torch.equal(result.aux["w"], params["w"].expand(4, 2, 3))
    assert torch.equal(result.aux["rows"], params["w"].t().expand(4, 3, 2))
    torch.testing.assert_close(result.aux["y"], x @ params["w"].t())
    assert not any(y.requires_grad for y in (*result.aux.values(), result.values))
    assert result.untapped == {}


def test_looking_at_uses_changes_no_random_numbers_and_does_not_warn():
    def loss(p, x):
        warnings.warn("once", UserWarning, stacklevel=1)
        return last(F.dropout(F.linear(x, p["w"])))

    state = torch.get_rng_state()
    (use,) = TorchTaps().uses(with_aux(loss), 0, ({"w": tensor(2, 3)}, tensor(4, 3)), (None, 0))
    assert use.uses[0].terms == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_each_example_draws_its_own_dropout():
    torch.manual_seed(0)
    loss = lambda p, x: F.dropout(F.linear(x, p["w"])).sum()
    result = TorchTaps().run(
        with_aux(loss), 0, ({"w": tensor(64, 3)}, torch.ones(4, 3, dtype=DTYPE)), (None, 0), [True]
    )
    assert len({row.sum().item() for row in result.gradients[0][0].terms[0].left}) > 1


def test_a_function_that_fails_has_no_taps():
    loss = lambda p, x: last(x @ p["w"]) * (x.sum().item() > 0)
    (use,) = TorchTaps().uses(with_aux(loss), 0, ({"w": tensor(3, 3)}, tensor(4, 3)), (None, 0))
    assert use.reason.startswith("the function fails under torch.func.vmap (vmap: It looks like you're calling .item()")
    with pytest.raises(RuntimeError, match='pass method="loop"'):
        TorchTaps().run(with_aux(loss), 0, ({"w": tensor(3, 3)}, tensor(4, 3)), (None, 0), [True])


def test_batch_norm_is_refused():
    loss, params = of_module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with pytest.raises(RuntimeError, match="BatchNorm1d in training mode mixes the examples"):
        TorchTaps().run(with_aux(loss), 0, (params, tensor(4, 3)), (None, 0), [True] * 4)


def test_an_input_that_is_overwritten_is_an_error():
    def loss(p, x):
        h = torch.tanh(x)
        y = F.linear(h, p["w"])
        h.mul_(2)
        return last(y)

    with pytest.raises(RuntimeError, match="the input of linear has been modified by an in-place operation"):
        TorchTaps().run(with_aux(loss), 0, ({"w": tensor(3, 3)}, tensor(4, 3)), (None, 0), [True])


def test_results_may_be_overwritten():
    def loss(p, x):
        y = F.linear(x, p["w"])
        y.relu_()
        z = (y @ p["v"]).mul_(3)
        z[0] += 1
        return last(z)

    uses, _ = checked(loss, {"w": tensor(4, 3), "v": tensor(4, 2)}, tensor(4, 5, 3))
    assert [use.reason for use in uses.values()] == ["", ""]


def test_a_loss_must_be_a_scalar():
    loss = lambda p, x: F.linear(x, p["w"])
    with pytest.raises(ValueError, match=r"scalar tensor for each example, got Tensor of shape \(5, 2\)"):
        TorchTaps().run(with_aux(loss), 0, ({"w": tensor(2, 3)}, tensor(4, 5, 3)), (None, 0), [True])


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


NOT_BY_VMAP = {
    "cell": nn.GRUCell(3, 4),
    "layer": nn.LSTM(3, 4, bias=False),
    "checkpoint": Checkpointed(nn.Linear(3, 4)),
}


@pytest.mark.parametrize("name", NOT_BY_VMAP)
def test_whole_calls_take_what_vmap_cannot_run(name):
    module = NOT_BY_VMAP[name].double()
    params, x = dict(module.named_parameters()), tensor(6, 5, 3)

    def loss(p, x):
        made = torch.func.functional_call(module, p, x)
        return last(made[0] if isinstance(made, tuple) else made)

    found, expected = (
        clipped_grad(loss, 1.0, method=method, keep_batch_dim=False)(params, x) for method in ("ghost", "loop")
    )
    assert distance(found, expected) < 1e-6


def test_planning_draws_no_random_numbers_of_python_or_numpy():
    drawn = []

    def loss(w, x):
        drawn.append((random.random(), np.random.random()))
        return (x @ w).sum()

    found = []
    for method in ("ghost", "materialize"):
        random.seed(1)
        np.random.seed(1)
        gradclip.clipped_grad(loss, 1.0, method=method)(torch.ones(64, 64), torch.ones(8, 64))
        found.append((drawn[-1], random.random(), np.random.random()))
    assert found[0] == found[1]
