"""Products with parameters: `linear`, `matmul`, `einsum` and their kin, recurrent cells, and normalizations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch.parameter import (
    UNKNOWN,
    Arguments,
    Keywords,
    Operation,
    all_arguments,
    handles,
    tapped,
)
from gradclip._src.private.ghost.torch.run import Labels, Product, Tap, Term, as_multiplied, paired, unviewed

Normalize = Callable[[torch.Tensor, Any, Any], torch.Tensor]


@handles(F.layer_norm)
def layer_norm(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the input, and normalize over the last axis."""
    x, shape, weight, bias, eps = all_arguments(func, args, kwargs)
    return _normalized("layer_norm", x, weight, bias, lambda x, w, b: F.layer_norm(x, shape, w, b, eps))


@handles(F.rms_norm)
def rms_norm(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the input, and normalize over the last axis."""
    x, shape, weight, eps = all_arguments(func, args, kwargs)
    return _normalized("rms_norm", x, weight, None, lambda x, w, b: F.rms_norm(x, shape, w, eps))


@handles(F.group_norm)
def group_norm(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep the input, and normalize groups of channels."""
    x, groups, weight, bias, eps = all_arguments(func, args, kwargs)

    def normalize(batch: torch.Tensor, w: Any, b: Any) -> torch.Tensor:
        return F.group_norm(batch.flatten(0, 1), groups, w, b, eps).unflatten(0, batch.shape[:2])

    return _normalized("group_norm", x, weight, bias, normalize, channels=2)


def _normalized(
    name: str, x: torch.Tensor, weight: Any, bias: Any, normalize: Normalize, channels: int | None = None
) -> Any:
    """Normalize the inputs of all examples. `channels` is the axis of scale and bias, None for the last."""
    own = [p for p in (weight, bias) if p is not None]
    if tapped(x) or not all(map(whole_bias, own)) or not own[0].tap.inside:
        return UNKNOWN
    run = own[0].tap.run
    given = run.batch(x)
    made = unviewed(normalize(given, *(None if p is None else p.tap.weight for p in (weight, bias))))
    axis = made.dim() - 1 if channels is None else channels
    axes = tuple(i for i in range(1, made.dim()) if i != axis)
    if run.recording:
        run.edge(made)
    if weight is not None:
        _keep_scale(weight.tap, given, made, axes, name, normalize)
    if bias is not None:
        bias.tap.keep_bias(axes, tuple(made.shape), name)
    return run.one(made)


def _keep_scale(
    tap: Tap, given: torch.Tensor, made: torch.Tensor, axes: tuple[int, ...], name: str, normalize: Normalize
) -> None:
    """Keep that a parameter scales the normalized inputs, all along these axes."""
    if not tap.run.recording:
        return
    tap.leaf.untap(f"scale of {name}")
    factor = as_multiplied(given, made)

    def finish(e: torch.Tensor) -> Made:
        rows = e * normalize(factor, None, None)
        return Made(rows.sum(axes) if axes else rows)

    tap.leaf.terms.append(Term(None, 0, name, len(tap.run.edges) - 1, finish, given, given._version))


@handles(F.linear)
def linear(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep y = x W^T + b; the gradient of b is the cotangent, summed over positions."""
    x, weight, bias = _linear_arguments(*args, **kwargs)
    if tapped(x) or not tapped(weight):
        return UNKNOWN
    tap: Tap = weight.tap
    roles = tap.roles(_MATRIX if tap.weight.dim() == 2 else _VECTOR)
    if roles is None:
        return UNKNOWN
    run, given = tap.run, tap.run.batch(x)
    flat = given if given.dim() == 2 else given.reshape(-1, given.shape[-1])
    own = whole_bias(bias)
    made = F.linear(flat, tap.weight, bias.tap.weight if own else None)
    factor, positions = as_multiplied(flat, made), len(flat) // run.count
    tap.keep_term(
        roles.place, positions, "linear", made, flat, lambda e: paired(roles, factor, e, run.count, positions)
    )
    if own:
        bias.tap.keep_bias((1,), (run.count, positions, made.shape[-1]), "linear")
    one = run.one(made if given.dim() == 2 else made.view(*given.shape[:-1], *made.shape[1:]))
    return one if own or bias is None else one + bias


def _linear_arguments(input: object, weight: object, bias: object = None) -> tuple[Any, ...]:
    return input, weight, bias


_MATRIX = Product(("position", "in"), ("out", "in"), ("position", "out"))
_VECTOR = Product(("position", "in"), ("in",), ("position",))


def whole_bias(bias: object) -> bool:
    """Say whether this is a whole parameter with one axis."""
    return tapped(bias) and bias.tap.parent is None and bias.tap.weight.dim() == 1  # type: ignore[attr-defined]


def _contracted(
    func: Operation, operands: Sequence[Any], product: Product, name: str, *more: object, **kwargs: object
) -> Any:
    """Keep the product of an input and a parameter, in either order. `more` are further arguments of the operation."""
    second = tapped(operands[1])
    x, tap = operands[not second], operands[second].tap
    roles = tap.roles(product)
    if roles is None:
        return UNKNOWN
    given = tap.run.batch(x)
    one, weight = tap.run.one(given), tap.weight
    made = func(*((one, weight) if second else (weight, one)), *more, **kwargs)
    return tap.run.one(tap.keep(roles, given, tap.run.batch(made), name))


@handles(
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.dot),
    *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.dot),
    torch.Tensor.__matmul__,
)
def matmul(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep a product of an input and a parameter, in either order."""
    if len(args) != 2 or kwargs or tapped(args[0]) == tapped(args[1]):
        return UNKNOWN
    shapes = [tuple(x.tap.weight.shape if tapped(x) else x.shape) for x in args]
    products = _matmul_products(*shapes)
    return _contracted(torch.matmul, args, products[not tapped(args[1])], "matmul")


@handles(torch.Tensor.__rmatmul__)
def matmul_reversed(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep a product of two tensors, the second given first."""
    return matmul(torch.matmul, args[::-1], kwargs)


@lru_cache(maxsize=4096)
def _matmul_products(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[Product, Product]:
    """Return the product of factors of these shapes, the second a parameter, or the first."""
    batches = first[:-2], second[:-2]
    count = max(map(len, batches))
    labels: list[Labels] = []
    for mine, other in (batches, batches[::-1]):
        own = []
        for i in range(-len(mine), 0):
            stretched = mine[i] == 1 and -i <= len(other) and other[i] != 1
            own.append(("stretched", len(labels), i) if stretched else i)
        labels.append(tuple(own))
    left = (*labels[0], *(("row",) if len(first) > 1 else ()), "sum")
    right = (*labels[1], "sum", *(("column",) if len(second) > 1 else ()))
    result = (*range(-count, 0), *(x for x in (*left, *right) if x in ("row", "column")))
    return Product(left, right, result), Product(right, left, result)


@handles(torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm, torch.addmv, torch.Tensor.addmv)
def added(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep beta * input + alpha * (first @ second) as a product and a sum."""
    if len(args) != 3 or not set(kwargs) <= {"alpha", "beta"} or tapped(args[1]) == tapped(args[2]):
        return UNKNOWN
    base, first, second = args
    made, beta = torch.matmul(first, second), kwargs.get("beta", 1)
    if kwargs.get("alpha", 1) != 1:
        made = made * kwargs["alpha"]
    if beta == 0:
        return made
    return made + (base if beta == 1 else base * beta)


@handles(torch.einsum)
def einsum(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep a sum of products of an input and a parameter."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or tapped(operands[0]) == tapped(operands[1]):
        return UNKNOWN
    products = _einsum_products(equation.replace(" ", ""), tuple(x.dim() for x in operands))
    product = None if products is None else products[not tapped(operands[1])]
    if product is None or _stretched(operands, product):
        return UNKNOWN
    return _contracted(partial(torch.einsum, equation), operands, product, "einsum")


@lru_cache(maxsize=4096)
def _einsum_products(equation: str, axes: tuple[int, ...]) -> tuple[Product, Product] | None:
    """Return the product of operands, the second a parameter, or the first. Labels of dots are negative numbers."""
    left, arrow, result = equation.partition("->")
    texts = left.split(",")
    if len(texts) != len(axes):
        return None
    hidden = [n - len(text.replace("...", "")) for text, n in zip(texts, axes, strict=True)]
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        result = ("..." if "..." in left else "") + "".join(sorted(x for x in letters if letters.count(x) == 1))
    counts = [*hidden, max(hidden)]
    first, second, last = (_expanded(text, count) for text, count in zip([*texts, result], counts, strict=True))
    return Product(first, second, last), Product(second, first, last)


def _expanded(text: str, hidden: int) -> Labels:
    before, dots, after = text.partition("...")
    return (*before, *(range(-hidden, 0) if dots else ()), *after)


def _stretched(operands: Sequence[torch.Tensor], product: Product) -> bool:
    """Say whether an axis of length 1 is stretched."""
    sizes: dict[object, int] = {}
    labels = [product.view if tapped(x) else product.given for x in operands]
    pairs = [pair for x, names in zip(operands, labels, strict=True) for pair in zip(names, x.shape, strict=True)]
    return any(sizes.setdefault(name, size) != size for name, size in pairs)


@handles(torch.tensordot)
def tensordot(func: Operation, args: Arguments, kwargs: Keywords) -> Any:
    """Keep a sum of products over pairs of axes."""
    first, second, dims, out = _tensordot_arguments(*args, **kwargs)
    if tapped(first) == tapped(second) or out is not None:
        return UNKNOWN
    n, m = first.dim(), second.dim()
    pairs = (range(n - dims, n), range(dims)) if isinstance(dims, int) else dims
    products = _tensordot_products(n, m, tuple(tuple(map(int, axes)) for axes in pairs))
    return _contracted(torch.tensordot, (first, second), products[not tapped(second)], "tensordot", dims)


@lru_cache(maxsize=4096)
def _tensordot_products(n: int, m: int, pairs: tuple[tuple[int, ...], ...]) -> tuple[Product, Product]:
    """Return the product of operands with n and m axes, the second a parameter, or the first."""
    joined = {i % m: j % n for j, i in zip(*pairs, strict=True)}
    left = tuple(range(n))
    right = tuple(joined.get(i, n + i) for i in range(m))
    result = (*(x for x in left if x not in right), *(x for x in right if x not in left))
    return Product(left, right, result), Product(right, left, result)


def _tensordot_arguments(a: object, b: object, dims: object = 2, out: object = None) -> tuple[Any, ...]:
    return a, b, dims, out


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
