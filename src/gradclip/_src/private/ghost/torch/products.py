"""Products with parameters: `linear`, `matmul` and its kin, `einsum` and `tensordot`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from gradclip._src.private.ghost.torch.parameter import UNKNOWN, Arguments, Keywords, Operation, handles, tapped
from gradclip._src.private.ghost.torch.run import Tap, as_multiplied
from gradclip._src.private.ghost.torch.terms import Labels, Product, paired


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
