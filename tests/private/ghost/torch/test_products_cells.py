"""Recurrent cells and layers come in factors, at all their steps."""

import pytest
import torch
from torch import nn

from tapped_torch import distance, gradients_by_loop, tapped_gradients

DTYPE = torch.float64


def last(y):
    """A loss of any results in which each element counts differently."""
    if isinstance(y, tuple):
        return sum(last(one) * (i + 1) for i, one in enumerate(y))
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


class Loop(nn.Module):
    """A cell, called at each step."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.cell = kind(3, 4, **settings)

    def forward(self, x):
        state = None
        for step in x:
            state = self.cell(step, state)
        return state


def checked(module, *inputs):
    """Return the uses of a module's parameters, after a look at the gradients."""
    torch.manual_seed(0)
    module.to(DTYPE)
    params = {name: torch.randn_like(x) for name, x in module.named_parameters()}
    loss = lambda p, *x: last(torch.func.functional_call(module, p, x))
    x = [torch.randn(shape, dtype=DTYPE) for shape in inputs]
    uses, result, found = tapped_gradients(loss, params, *x)
    assert distance(found, gradients_by_loop(loss, params, *x)) < 1e-10
    assert result.untapped == {}
    return uses


CELLS = [
    Loop(nn.GRUCell),
    Loop(nn.LSTMCell),
    Loop(nn.RNNCell),
    Loop(nn.RNNCell, nonlinearity="relu"),
    Loop(nn.GRUCell, bias=False),
    Loop(nn.LSTMCell, bias=False),
]


@pytest.mark.parametrize("module", CELLS, ids=lambda module: str(module.cell))
@pytest.mark.parametrize("shape", [(3, 6, 3), (3, 6, 2, 3)], ids=["alone", "two sequences"])
def test_cells_have_a_term_for_each_step(module, shape):
    uses = checked(module, shape)
    positions = 1 if len(shape) == 3 else 2
    for name, use in uses.items():
        if "weight" in name:
            assert [one.terms for one in use.uses] == [positions] * 6, name
            assert len({one.place for one in use.uses}) == 1
        else:
            assert use.reason == "bias of linear"


LAYERS = [
    nn.GRU(3, 4),
    nn.LSTM(3, 4),
    nn.RNN(3, 4),
    nn.RNN(3, 4, nonlinearity="relu"),
    nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, bias=False),
    nn.LSTM(3, 4, num_layers=2, proj_size=2),
]


@pytest.mark.parametrize("module", LAYERS, ids=str)
def test_layers_have_a_term_for_each_step(module):
    uses = checked(module, (3, 2, 6, 3)) if module.batch_first else checked(module, (3, 6, 3))
    sequences = 2 if module.batch_first else 1
    for name, use in uses.items():
        if "weight_ih" in name:
            assert [one.terms for one in use.uses] == [6 * sequences], name
        elif "weight" in name:
            assert [one.terms for one in use.uses] == [sequences] * 6, name


def test_layers_take_a_first_state():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LSTM(3, 4, num_layers=2)

        def forward(self, x, h, c):
            return self.layers(x, (h, c))

    checked(Given(), (3, 6, 3), (3, 2, 4), (3, 2, 4))


def test_cells_are_known_where_some_parameters_are_made():
    torch.manual_seed(0)
    module = Loop(nn.GRUCell).to(DTYPE)
    params = {name: x.detach() for name, x in module.named_parameters()}
    loss = lambda p, x: last(torch.func.functional_call(module, p, (x,)))
    x = torch.randn(3, 6, 3, dtype=DTYPE)
    for only in ([], ["cell.weight_hh"], ["cell.weight_ih"]):
        _, _, found = tapped_gradients(loss, params, x, only=only)
        assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_dropout_between_layers_differs_between_examples():
    module = nn.LSTM(3, 64, num_layers=2, dropout=0.5)
    params = {name: x.detach() for name, x in module.named_parameters()}
    loss = lambda p, x: torch.func.functional_call(module, p, (x,))[0].sum()
    torch.manual_seed(0)
    _, result, _ = tapped_gradients(loss, params, torch.ones(4, 2, 3))
    assert len(set(result.values.tolist())) == 4


def test_packed_sequences_have_no_taps():
    module = nn.GRU(3, 4).to(DTYPE)

    def loss(p, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
        return torch.func.functional_call(module, p, (packed,))[0].data.sum()

    params = {name: x.detach() for name, x in module.named_parameters()}
    with pytest.raises(RuntimeError, match='pass method="loop"'):
        tapped_gradients(loss, params, torch.randn(3, 4, 2, 3, dtype=DTYPE))
