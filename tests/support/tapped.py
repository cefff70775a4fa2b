"""Gradients in factors, put together again in float64."""

import math

import numpy as np

from gradclip._src.private.ghost.records import Dense, Made


def per_example(gradient, shape, batch):
    """Return the gradient of each example for one parameter: an array of shape (batch, *shape)."""
    if isinstance(gradient, Made):
        return np.asarray(gradient.rows, np.float64)
    found, seen = np.zeros((batch, *shape)), np.zeros(shape, int)
    for part in gradient:
        place = part.place
        box = tuple(slice(a, b) for a, b in zip(place.start, place.stop, strict=True))
        assert found[:, *box].shape == (batch, *place.box)
        assert math.prod(place.view) == math.prod(place.box)
        assert sorted(place.axes) == list(range(len(place.view)))
        seen[box] += 1
        for terms in part.terms:
            found[:, *box] += _in_place(_matrices(terms, place.shape), place)
    assert seen.max(initial=0) <= 1, "parts overlap"
    return found


def _matrices(terms, shape):
    """Return the sum of the outer products: an array of shape (batch, blocks, rows, columns)."""
    if isinstance(terms, Dense):
        left, right = (np.asarray(x, np.float64) for x in terms)
        assert left.shape[1:] == (shape[0], left.shape[2], shape[1])
        assert right.shape[1:] == (shape[0], left.shape[2], shape[2])
        return np.einsum("bgtr,bgtc->bgrc", left, right)
    indices, right = np.asarray(terms.indices), np.asarray(terms.right, np.float64)
    assert (shape[0], right.shape) == (1, (*indices.shape, shape[2]))
    assert indices.dtype.kind == "i"
    assert indices.min(initial=0) >= 0
    assert indices.max(initial=0) < shape[1]
    found = np.zeros((len(indices), *shape))
    for example, (rows, values) in enumerate(zip(indices, right, strict=True)):
        np.add.at(found[example, 0], rows, values)
    return found


def _in_place(matrices, place):
    """Return matrices as the part of the parameter that they are."""
    split = matrices.reshape(len(matrices), *(place.view[axis] for axis in place.axes))
    turned = split.transpose(0, *(1 + place.axes.index(axis) for axis in range(len(place.view))))
    return turned.reshape(len(matrices), *place.box)
