"""Graphs that `tf.function` recorded for eager calls, reused for later calls with the same settings."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradclip.per_example.batching.verbs import Programs
from gradclip.tree import FlatTree, flatten

# Values of these types cannot change, so they may be part of a program's key.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_ARRAYS = (tf.Tensor, tf.Variable, np.ndarray, np.generic)

Made = tuple[Any, list[Any]]


def by_program(programs: Programs, setting: object, run: Callable[..., Made], args: Sequence[Any]) -> Made:
    """Return `run(*args)`, a tree of tensors and a list of dtypes. Reuse a recorded graph if possible.

    `run` is called without a graph of its own while TensorFlow records, and for mutable objects.
    """
    flat, fixed = flatten(list(args)), flatten(setting).leaves
    key = _key(flat, setting, fixed) if tf.executing_eagerly() else None
    if key is None:
        return run(*args)
    if key not in programs:
        programs.keep(key, _Program(run, flat))
    return programs[key](_tensors(flat))


class _Program:
    """A graph of a function of the arrays among its arguments. Results that are not tensors are stored separately."""

    def __init__(self, run: Callable[..., Made], flat: FlatTree) -> None:
        fixed = [None if isinstance(x, _ARRAYS) else x for x in flat.leaves]
        self._made: tuple[FlatTree, list[Any]] | None = None

        def call(arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            rest = iter(arrays)
            leaves = [next(rest) if isinstance(x, _ARRAYS) else y for x, y in zip(flat.leaves, fixed, strict=True)]
            made, dtypes = run(*flat.rebuild(leaves))
            self._made = flatten(made), list(dtypes)
            return list(map(tf.convert_to_tensor, self._made[0].leaves))

        specs = [tf.TensorSpec.from_tensor(x) for x in _tensors(flat)]
        self._call = tf.function(call, autograph=False).get_concrete_function(specs)

    def __call__(self, arrays: Sequence[tf.Tensor]) -> Made:
        assert self._made is not None  # set when the graph was recorded
        flat, dtypes = self._made
        return flat.rebuild(self._call(arrays)), dtypes


def _tensors(flat: FlatTree) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(x) for x in flat.leaves if isinstance(x, _ARRAYS)]


def _key(flat: FlatTree, setting: object, fixed: Sequence[Any]) -> Hashable | None:
    constants = [x for x in (*flat.leaves, *fixed) if not isinstance(x, _ARRAYS)]
    # `run` uses its own settings. If one of them is an array, a graph would keep its current values forever.
    if any(isinstance(x, _ARRAYS) for x in fixed) or not all(
        isinstance(x, _CONSTANTS) or callable(x) for x in constants
    ):
        return None
    places = tuple(isinstance(x, _ARRAYS) for x in flat.leaves)
    dtypes = tuple((x.dtype, tuple(x.shape)) for x in flat.leaves if isinstance(x, _ARRAYS))
    named = tuple((type(x), repr(x) if isinstance(x, int | float | complex) else x) for x in constants)
    try:
        key = (flat.structure, places, dtypes, named, repr(setting))
        hash(key)
    except TypeError:
        return None
    return key
