"""Gradients in factors, turned back into the gradient of each example, and the same gradients found another way."""

import torch

from gradclip._src.private.ghost.records import Embedding, Made
from gradclip._src.private.ghost.torch.taps import TorchTaps


def remade(gradient, shape, count):
    """Return the gradient of each example, of shape (count, *shape) in float64."""
    if isinstance(gradient, Made):
        assert gradient.rows.shape == (count, *shape)
        return gradient.rows.double()
    assert disjoint(gradient)
    total = torch.zeros(count, *shape, dtype=torch.float64)
    for part in gradient:
        place = part.place
        matrices = sum(matrices_of(term, place, count) for term in part.terms)
        sizes = [place.view[axis] for axis in place.axes]
        back = sorted(range(len(place.axes)), key=lambda i: place.axes[i])
        viewed = matrices.reshape(count, *sizes).permute(0, *(1 + i for i in back))
        region = tuple(slice(a, b) for a, b in zip(place.start, place.stop, strict=True))
        total[(slice(None), *region)] += viewed.reshape(count, *place.box)
    return total


def matrices_of(term, place, count):
    """Return the sum over t of left_t right_t^T: shape (count, blocks, rows, columns)."""
    blocks, rows, columns = place.shape
    if isinstance(term, Embedding):
        assert blocks == 1
        made = torch.zeros(count, 1, rows, columns, dtype=torch.float64)
        for example in range(count):
            for index, row in zip(term.indices[example].tolist(), term.right[example].double(), strict=True):
                made[example, 0, index] += row
        return made
    left, right = term
    assert left.shape[:3] == right.shape[:3] == (count, blocks, left.shape[2])
    assert (left.shape[3], right.shape[3]) == (rows, columns)
    return torch.einsum("bgtr,bgtc->bgrc", left.double(), right.double())


def disjoint(parts):
    """Say whether no element of the parameter is in two parts."""
    boxes = [(part.place.start, part.place.stop) for part in parts]
    for i, (start, stop) in enumerate(boxes):
        for other_start, other_stop in boxes[:i]:
            if all(a < d and c < b for a, b, c, d in zip(start, stop, other_start, other_stop, strict=True)):
                return False
    return True


def with_aux(loss):
    """Return a loss as the taps get it, with an empty auxiliary result."""
    return lambda *args: (loss(*args), ())


def tapped_gradients(loss, params, *batch, only=None, has_aux=False):
    """Return (uses, result, gradients by name) of a loss of one example; each name in `only`, or all, is tapped."""
    fun = loss if has_aux else with_aux(loss)
    args, axes = (params, *batch), (None, *(0 for _ in batch))
    uses = TorchTaps().uses(fun, 0, args, axes)
    flags = [not use.reason if only is None else name in only for use, name in zip(uses, sorted(params), strict=True)]
    result = TorchTaps().run(fun, 0, args, axes, flags)
    count = len(batch[0])
    made = zip(sorted(params), result.gradients, strict=True)
    gradients = {name: remade(gradient, params[name].shape, count) for name, gradient in made}
    return dict(zip(sorted(params), uses, strict=True)), result, gradients


def gradients_by_loop(loss, params, *batch):
    """Return the gradient of each example by `torch.autograd.grad` on that example alone."""
    rows = []
    for i in range(len(batch[0])):
        own = {name: x.detach().clone().requires_grad_() for name, x in params.items()}
        value = loss(own, *(x[i] for x in batch))
        used = value.requires_grad
        grads = torch.autograd.grad(value, list(own.values()), allow_unused=True) if used else [None] * len(own)
        rows.append([torch.zeros_like(x) if g is None else g for x, g in zip(own.values(), grads, strict=True)])
    return {name: torch.stack([row[i] for row in rows]).double() for i, name in enumerate(params)}


def distance(found, expected):
    """Return the largest difference of any gradient, relative to the largest element of the true one."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name] - true).abs().max() / true.abs().max().clamp_min(1e-30)).item() for name, true in expected.items()
    )
