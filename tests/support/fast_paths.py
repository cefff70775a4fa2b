"""Calls without a fast path, and what it takes for two results to be the same."""

from unittest import mock

import numpy as np
import torch

from gradclip._src import look
from gradclip._src.functional import driver as functional


def without(module, doors, function, *args, **kwargs):
    """Return what a function returns when the doors of a module find no ordinary call."""
    with mock.patch.multiple(module, **dict.fromkeys(doors, lambda *_, **__: None)):
        return function(*args, **kwargs)


def in_full(function, *args, **kwargs):
    """Yield what a function returns when one look settles no norm, and when no arrays are taken as ordinary either."""
    doors = ("norm", "clip_", "clip_by_known_", "clamp_", "clipped", "settled")
    yield without(look.Look, doors, function, *args, **kwargs)
    with mock.patch.object(functional, "read", return_value=None):
        yield without(look, ["gradients"], function, *args, **kwargs)


def settling(monkeypatch, methods):
    """Return a list that gets the names of these methods of a look, in order, as they settle a call."""
    found = []

    def noting(name, method):
        def noted(*args):
            result = method(*args)
            found.extend([] if result is None or result is False else [name])
            return result

        return noted

    for name in methods:
        monkeypatch.setattr(look.Look, name, noting(name, getattr(look.Look, name)))
    return found


def same(x, y):
    """Say whether two arrays are of one kind, dtype, shape and order in memory, with the same elements."""
    if type(x) is not type(y) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y) and x.stride() == y.stride()
    return np.array_equal(x, y) and x.strides == y.strides
