"""Whole private steps with factors that a test knows exactly, and what they multiply each example's gradient by."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from factors import numbers, wide
from gradclip._src.private.ghost import clip, plan, step
from gradclip._src.private.ghost.records import Dense, Made

EXAMPLES, TERMS = 8, 4


def _embedding(table, x):
    return torch.nn.functional.embedding(x, table) if isinstance(table, torch.Tensor) else table[x]


def _convolution(x, w):
    if isinstance(w, torch.Tensor):
        return torch.nn.functional.conv1d(x[None], w)[0]
    return lax.conv_general_dilated(x[None], w, (1,), "VALID")[0]


def _recurrent(w, x, e):
    if isinstance(w, torch.Tensor):
        h, total = torch.zeros_like(x[0]), 0.0
        for x_t, e_t in zip(x, e, strict=True):
            h = x_t + h @ w
            total = total + (h * e_t).sum()
        return total
    return lax.scan(lambda h, given: ((new := given[0] + h @ w), (new * given[1]).sum()), x[0] * 0, (x, e))[1].sum()


def _tied(w, indices, x, e, f):
    return (_embedding(w, indices) * e).sum() + ((x @ w.T) * f).sum()


STEPS = {
    "linear": ((3, 2), lambda w, i, x, e, f: ((x @ w) * e).sum()),
    "embedding": ((3, 2), lambda w, i, x, e, f: (_embedding(w, i) * e).sum()),
    "tied": ((3, 2), lambda w, i, x, e, f: _tied(w, i, e, f[..., :2], x)),
    "convolution": ((2, 3, 2), lambda w, i, x, e, f: (_convolution(x.T, w) * e[1:].T).sum()),
    "scan": ((3, 3), lambda w, i, x, e, f: _recurrent(w, x, f)),
}
"""The shape of a parameter, and a loss. All but "scan" are linear in each use of it, so that its factors are data."""


def batch(kind, dtype, seed):
    """Return indices, and three arrays of numbers of a kind. They are about 1, so that a threshold of 1 clips some."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(3, size=(EXAMPLES, TERMS))
    x, e, f = (numbers(kind, (EXAMPLES, TERMS, n), rng, dtype) for n in (3, 2, 3))
    if kind == "cancelling":  # in pairs: one side changes its sign, the other is the same
        x[:, 1::2], indices[:, 1::2] = x[:, 0::2], indices[:, 0::2]
    return indices, x, e, f


def arguments(framework, name, indices, *arrays, dtype):
    """Return the parameter and the batch as arrays of a framework."""
    shape, _ = STEPS[name]
    parameter = np.random.default_rng(5).standard_normal(shape) / 4
    given = [np.asarray(a).astype(np.float64) for a in (parameter, *arrays)]
    if framework == "torch":
        parameter, *rest = (torch.tensor(a).to(getattr(torch, dtype)) for a in given)
        return parameter, torch.tensor(indices), *rest
    parameter, *rest = (jnp.asarray(a.astype(jnp.dtype(dtype))) for a in given)
    return parameter, jnp.asarray(indices.astype(np.int32)), *rest


class Recorded:
    """What a step adds up: the gradients in factors of a parameter, and each example's weight, exactly."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(plan, "SMALLEST", 1)
        monkeypatch.setattr(step, "SMALLEST", 1)
        monkeypatch.setattr(plan, "_LARGE", 1)
        self.parts, self.own, self.exponents, self.times = None, None, None, 1.0
        clipped_sums, in_units = clip.clipped_sums, clip._in_units

        def with_gradients(products, backend, gradients, *rest):
            (gradient,) = gradients
            assert not isinstance(gradient, Made)
            places = [(part.place, [type(terms) for terms in part.terms]) for part in gradient]
            arrays = [list(terms) for part in gradient for terms in part.terms]
            _told(lambda given: setattr(self, "parts", (places, given)), arrays)
            return clipped_sums(products, backend, gradients, *rest)

        def with_weights(products, weights, exponents):
            own = in_units(products, weights, exponents) * self.times
            _told(lambda given: setattr(self, "own", given), own)
            zeros = own * 0 if exponents is None else exponents
            _told(lambda given: setattr(self, "exponents", given), zeros)
            return own

        monkeypatch.setattr(clip, "clipped_sums", with_gradients)
        monkeypatch.setattr(clip, "_in_units", with_weights)

    def weights(self):
        """Return the weight of each example."""
        jax.effects_barrier()
        pairs = zip(wide(self.own), wide(self.exponents), strict=True)
        return [Fraction(float(w)) * Fraction(2) ** -int(k) for w, k in pairs]

    def gradients(self, shape):
        """Return the gradient of each example, as an array of fractions."""
        jax.effects_barrier()
        places, arrays = self.parts
        rest = iter(arrays)
        found = np.full((EXAMPLES, *shape), Fraction(0))
        for place, kinds in places:
            box = tuple(slice(a, b) for a, b in zip(place.start, place.stop, strict=True))
            for kind in kinds:
                found[:, *box] += _placed(_matrices(kind, next(rest), place.shape), place)
        return found


def _told(tell, given):
    leaves, structure = jax.tree.flatten(given)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return tell(given)
    # A callback may run in 32-bit mode, which would round.
    narrow = [x.dtype != np.float64 for x in leaves]
    bits = [x if one else lax.bitcast_convert_type(x, np.uint32) for x, one in zip(leaves, narrow, strict=True)]

    def found(*values):
        pairs = zip(map(np.asarray, values), narrow, strict=True)
        tell(jax.tree.unflatten(structure, [x if one else x.view(np.float64)[..., 0] for x, one in pairs]))

    return jax.debug.callback(found, *bits)


def fractions(x):
    """Return an array of the same numbers as fractions."""
    return np.frompyfunc(lambda v: Fraction(float(v)), 1, 1)(wide(x))


def _matrices(kind, arrays, shape):
    """Return the sum of the terms of each example: shape (batch, blocks, rows, columns)."""
    if kind is Dense:
        left, right = map(fractions, arrays)
        return np.swapaxes(left, 2, 3) @ right
    indices, right = np.asarray(arrays[0]), fractions(arrays[1])
    found = np.full((len(indices), *shape), Fraction(0))
    for example, (rows, values) in enumerate(zip(indices, right, strict=True)):
        for row, value in zip(rows, values, strict=True):
            found[example, 0, row] += value
    return found


def _placed(matrices, place):
    split = matrices.reshape(len(matrices), *(place.view[axis] for axis in place.axes))
    turned = split.transpose(0, *(1 + place.axes.index(axis) for axis in range(len(place.view))))
    return turned.reshape(len(matrices), *place.box)
