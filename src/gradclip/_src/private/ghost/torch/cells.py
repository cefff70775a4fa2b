"""Recurrent cells and layers, as products with parameters and what is done with their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gradclip._src.private.ghost.torch.parameter import UNKNOWN, Arguments, Keywords, Operation, handles, tapped
from gradclip._src.private.ghost.torch.run import Tap

State = tuple[torch.Tensor, ...]
Gates = Callable[[torch.Tensor, torch.Tensor, State], State]


class RecurrentCell(NamedTuple):
    """A recurrent cell: the new state, the output first, from its two products and the state before."""

    gates: Gates
    states: int


def _simple(activation: Callable[[torch.Tensor], torch.Tensor]) -> RecurrentCell:
    return RecurrentCell(lambda x, h, state: (activation(x + h),), 1)


def _gru(x: torch.Tensor, h: torch.Tensor, state: State) -> State:
    size = state[0].shape[-1]
    x_both, x_new = x.split((2 * size, size), -1)
    h_both, h_new = h.split((2 * size, size), -1)
    reset, update = torch.sigmoid(x_both + h_both).chunk(2, -1)
    new = torch.tanh(x_new + reset * h_new)
    return ((state[0] - new) * update + new,)


def _lstm(x: torch.Tensor, h: torch.Tensor, state: State) -> State:
    let_in, forget, new, out = (x + h).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


_GRU, _LSTM, _TANH, _RELU = RecurrentCell(_gru, 1), RecurrentCell(_lstm, 2), _simple(torch.tanh), _simple(torch.relu)
_CELLS = {torch.gru_cell: _GRU, torch.lstm_cell: _LSTM, torch.rnn_tanh_cell: _TANH, torch.rnn_relu_cell: _RELU}
_LAYERS = {torch.gru: _GRU, torch.lstm: _LSTM, torch.rnn_tanh: _TANH, torch.rnn_relu: _RELU}


@handles(*_CELLS)
def cell(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Compute one step of a cell by two linear products."""
    x, state, w_x, w_h, b_x, b_h = _cell_arguments(*args, **kwargs)
    kind = _CELLS[func]
    states = tuple(state) if kind.states > 1 else (state,)
    tap = _first_tap([w_x, w_h, b_x, b_h])
    if tap is None:
        return UNKNOWN
    made = _stepped(kind, tap, F.linear(x, w_x, b_x), F.linear(states[0], w_h, b_h), states)
    return made if kind.states > 1 else made[0]


def _cell_arguments(
    input: object, hx: object, w_ih: object, w_hh: object, b_ih: object = None, b_hh: object = None
) -> tuple[Any, ...]:
    return input, hx, w_ih, w_hh, b_ih, b_hh


def _first_tap(parameters: Sequence[object]) -> Tap | None:
    return next((x.tap for x in parameters if tapped(x)), None)  # type: ignore[attr-defined]


def _stepped(kind: RecurrentCell, tap: Tap, x: torch.Tensor, h: torch.Tensor, states: State) -> State:
    """Return the new state, computed for the whole batch."""
    if not tap.inside:
        return kind.gates(x, h, states)
    tap.run.only_tapped = True
    batch, one = tap.run.batch, tap.run.one
    return tuple(map(one, kind.gates(batch(x), batch(h), tuple(map(batch, states)))))


class _Weights(NamedTuple):
    """The parameters of a layer in one direction."""

    w_x: torch.Tensor
    w_h: torch.Tensor
    b_x: torch.Tensor | None
    b_h: torch.Tensor | None
    projection: torch.Tensor | None


@handles(*_LAYERS)
def layers(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Compute recurrent layers step by step. Packed sequences are unknown."""
    if kwargs or len(args) != 9:
        return UNKNOWN
    x, state, parameters, biases, count, dropout, training, both_ways, batch_first = args
    kind = _LAYERS[func]
    tap = _first_tap(parameters)
    if tap is None:
        return UNKNOWN
    states = tuple(state) if kind.states > 1 else (state,)
    y = x.transpose(0, 1) if batch_first else x
    ways, finals = 1 + both_ways, []
    for i, weights in enumerate(_by_layer(parameters, biases, count * ways)):
        if i % ways == 0:
            y = F.dropout(y, dropout, training) if i and dropout else y
            outputs: list[torch.Tensor] = []
        made, final = _one_way(kind, tap, y, tuple(s[i] for s in states), weights, backwards=i % ways == 1)
        outputs.append(made)
        finals.append(final)
        if i % ways == ways - 1:
            y = torch.cat(outputs, -1) if both_ways else made
    y = y.transpose(0, 1) if batch_first else y
    return (y, *(torch.stack(one) for one in zip(*finals, strict=True)))


def _by_layer(parameters: Sequence[torch.Tensor], biases: bool, count: int) -> Iterator[_Weights]:
    """Group parameters by layer and direction: two weights, two biases if there are any, and a projection if any."""
    size = len(parameters) // count
    for start in range(0, len(parameters), size):
        w_x, w_h, *rest = parameters[start : start + size]
        b_x, b_h = (rest.pop(0), rest.pop(0)) if biases else (None, None)
        yield _Weights(w_x, w_h, b_x, b_h, rest[0] if rest else None)


def _one_way(
    kind: RecurrentCell, tap: Tap, x: torch.Tensor, states: State, weights: _Weights, *, backwards: bool
) -> tuple[torch.Tensor, State]:
    """Return the outputs of a layer at all positions, and its last state."""
    inputs = torch.unbind(F.linear(x, weights.w_x, weights.b_x))
    outputs = []
    for one in reversed(inputs) if backwards else inputs:
        output, *others = _stepped(kind, tap, one, F.linear(states[0], weights.w_h, weights.b_h), states)
        if weights.projection is not None:
            output = F.linear(output, weights.projection)
        states = (output, *others)
        outputs.append(output)
    return torch.stack(outputs[::-1] if backwards else outputs), states
