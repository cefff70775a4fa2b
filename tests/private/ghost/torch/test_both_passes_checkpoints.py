"""Checkpointed parts of a function are run again in the backward pass, with the parameters passed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tapped_torch import distance, gradients_by_loop, tapped_gradients

DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def again(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


class Checkpointed(nn.Module):
    """A module, checkpointed, and an output layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(8, 2)

    def forward(self, x):
        return self.out(again(self.inner, torch.tanh(x)))


class Mixed(nn.Module):
    """Checkpoints in a row: a layer, a cell, and a function that uses a parameter in different ways."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.cell, self.table = nn.GRUCell(8, 8), nn.Embedding(4, 8)
        self.both = nn.Parameter(torch.ones(8, 8))

    def used_twice(self, x):
        return F.linear(x, self.both[:4]) + self.both.norm() + self.table(torch.arange(4)).sum()

    def forward(self, x):
        h = again(self.layer, x)
        h = h + again(self.cell, h[0, 0], h[0, 1])
        return again(self.used_twice, h)


def of_module(module):
    """Return the loss of a module, and its own parameters."""
    torch.manual_seed(0)
    module.to(DTYPE)
    return (lambda p, x: last(torch.func.functional_call(module, p, (x,)))), {
        name: x.detach() for name, x in module.named_parameters()
    }


INNER = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 8))]


@pytest.mark.parametrize("inner", INNER, ids=["one layer", "several"])
@pytest.mark.parametrize("tapped", [True, False])
def test_checkpointed_modules_come_in_factors(inner, tapped):
    loss, params = of_module(Checkpointed(inner))
    x = torch.randn(3, 5, 8, dtype=DTYPE)
    uses, result, found = tapped_gradients(loss, params, x, only=None if tapped else [])
    weights = [name for name, x in params.items() if x.ndim == 2]
    assert sorted(weights) == sorted(name for name, use in uses.items() if not use.reason)
    assert result.untapped == {}
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_checkpoints_in_a_row():
    loss, params = of_module(Mixed())
    x = torch.randn(3, 1, 5, 8, dtype=DTYPE)
    uses, result, found = tapped_gradients(loss, params, x)
    assert uses["both"].reason == "torch.Tensor.norm"
    assert uses["table.weight"].uses[0].embedding
    assert result.untapped == {}
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10
    _, result, found = tapped_gradients(loss, params, x, only=["both", "cell.weight_hh"])
    assert list(result.untapped.values()) == ["torch.Tensor.norm"]
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_functions_of_the_parameters_passed():
    loss = lambda p, x: last(again(lambda z: torch.tanh(z @ p["w"].t()) @ p["w"], x))
    torch.manual_seed(0)
    params, x = {"w": torch.randn(8, 8, dtype=DTYPE)}, torch.randn(3, 5, 8, dtype=DTYPE)
    _, _, found = tapped_gradients(loss, params, x)
    plain = lambda p, x: last(torch.tanh(x @ p["w"].t()) @ p["w"])
    assert distance(found, gradients_by_loop(plain, params, x)) < 1e-10


def test_the_second_run_draws_the_same_random_numbers():
    class Dropped(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
            self.checkpointed = checkpointed

        def forward(self, x):
            torch.manual_seed(3)
            return again(self.inner, x) if self.checkpointed else self.inner(x)

    x = torch.randn(4, 8, dtype=DTYPE)
    found = [tapped_gradients(*of_module(Dropped(flag)), x)[2] for flag in (True, False)]
    assert distance(*found) == 0
    assert found[0]["inner.0.weight"].any()


@pytest.mark.parametrize("ask", [lambda h: h.requires_grad_(), lambda h: h.requires_grad_(requires_grad=True)])
def test_values_in_between_may_be_asked_for_gradients(ask):
    """Hooks of a frozen embedding do so, that checkpoints behind it get any."""
    params, x = {"w": torch.randn(8, 8, dtype=DTYPE)}, torch.randn(3, 5, 8, dtype=DTYPE)
    plain = lambda p, x: last(torch.tanh(x * 2) @ p["w"])
    asked = lambda p, x: last(again(lambda z: torch.tanh(z) @ p["w"], ask(x * 2)))
    assert distance(tapped_gradients(asked, params, x)[2], gradients_by_loop(plain, params, x)) < 1e-10
    with pytest.raises(RuntimeError, match="requires_grad_"):
        tapped_gradients(lambda p, x: last((x @ p["w"]).requires_grad_(False)), params, x)


def test_parameters_of_other_memory_are_an_error():
    loss, params = of_module(Checkpointed(nn.Linear(8, 8)))
    others = {name: x + 1 for name, x in params.items()}
    with pytest.raises(RuntimeError, match="checkpointing computes Linear again with the module's own parameters"):
        tapped_gradients(loss, others, torch.randn(3, 5, 8, dtype=DTYPE), only=[])


def test_the_old_kind_of_checkpoint_is_refused():
    loss = lambda p, x: last(checkpoint(lambda z: z @ p["w"], x @ p["w"], use_reentrant=True))
    params, x = {"w": torch.ones(8, 8)}, torch.ones(3, 5, 8)
    with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
        tapped_gradients(loss, params, x)
