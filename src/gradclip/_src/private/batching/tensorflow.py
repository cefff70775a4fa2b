"""Functions of one example over a batch, for TensorFlow: `tf.vectorized_map`, and microbatches in a loop.

`tf.function` records each function once for each shape. Later eager calls with the same settings run the graph.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from gradclip._src.private.batching.verbs import (
    Args,
    Axes,
    Batching,
    Function,
    Made,
    Programs,
    Run,
    Step,
    Transform,
    mapped,
    mapped_args,
    named,
)
from gradclip._src.tree import FlatTree, flatten

_ARRAYS = (tf.Tensor, tf.Variable, np.ndarray, np.generic)


class TensorFlowBatching(Batching):
    """`Batching` for TensorFlow."""

    keeps_whole_batches = True
    modules_called = "model.stateless_call(parameters, state, x) does"

    def with_gradient(self, fun: Function, argnums: int | tuple[int, ...], transform: Transform | None) -> Function:
        return TensorFlowGradient(fun, argnums, transform)

    def over_batch(self, fun: Function, axes: Axes, spmd_axis_name: Hashable) -> Function:
        def call(*args: Any) -> Any:
            made: list[FlatTree] = []

            def of_rows(rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
                made[:] = [flatten(_on_rows(fun, flats, args, rows))]
                return list(map(tf.convert_to_tensor, made[0].leaves))

            flats = [None if axis is None else flatten(arg) for axis, arg in zip(axes, args, strict=True)]
            leaves = [_tensor(leaf) for flat in flats if flat is not None for leaf in flat.leaves]
            found = self._over_rows(of_rows, leaves)
            return made[0].rebuild(found)

        return call

    def _over_rows(self, of_rows: Callable[..., list[tf.Tensor]], leaves: list[tf.Tensor]) -> list[tf.Tensor]:
        return tf.vectorized_map(of_rows, leaves)

    def unused(self, fun: Function, args: Args, axes: Axes, summed: object) -> list[str]:
        return sorted(fun.unused or ()) if isinstance(fun, TensorFlowGradient) else []

    def keys(self, key: object, count: int) -> Any:
        return mapped(lambda seed: _seeds(_tensor(seed), count), key)

    def flags(self, mask: object) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(mask), tf.bool)

    def blanked(self, tree: object, mask: tf.Tensor) -> Any:
        def rows(x: tf.Tensor) -> tf.Tensor:
            return tf.where(tf.reshape(mask, [-1, *[1] * (x.ndim - 1)]), x, tf.zeros_like(x))

        return mapped(rows, tree)

    def padded(
        self, args: Args, axes: Axes, mask: tf.Tensor | None, count: int, size: int
    ) -> tuple[tuple[Any, ...], tf.Tensor]:
        def longer(x: Any) -> tf.Tensor:
            x = _tensor(x)
            if count:
                return tf.gather(x, tf.minimum(tf.range(size), count - 1))
            return tf.zeros(tf.concat([[size], tf.shape(x)[1:]], 0), x.dtype)

        many = mapped_args(longer, args, axes) if size > count else args
        real = tf.ones([count], tf.bool) if mask is None else mask
        return tuple(many), tf.concat([real, tf.zeros([size - count], tf.bool)], 0)

    def in_microbatches(
        self, step: Step, args: Args, axes: Axes, mask: tf.Tensor | None, count: int, size: int
    ) -> tuple[Any, Any]:
        if count < size:
            args, mask = self.padded(args, axes, mask, count, size)
        rows = max(count, size)
        number, most = -(-count // size), -(-rows // size)
        # Trailing microbatches without examples are skipped, so padding to one shape costs no time.
        if mask is not None:
            last = tf.reduce_max(tf.where(mask, tf.range(1, rows + 1), 0))
            number = -(-last // size)

        def microbatch(i: tf.Tensor | int) -> tuple[FlatTree, FlatTree]:
            # The last microbatch may repeat the last row. Count that row once.
            places = i * size + tf.range(size)
            some = tf.minimum(places, rows - 1)
            counted = places < rows if mask is None else (places < rows) & tf.gather(mask, some)
            summed, outputs = step(mapped_args(lambda x: tf.gather(_tensor(x), some), args, axes), counted)
            return flatten(summed), flatten(outputs)

        summed, outputs = microbatch(0)
        parts = [tf.TensorArray(x.dtype, most, element_shape=x.shape).write(0, x) for x in outputs.leaves]

        def body(i: tf.Tensor, sums: list[tf.Tensor], parts: list[tf.TensorArray]) -> Any:
            more, rest = microbatch(i)
            written = [part.write(i, x) for part, x in zip(parts, rest.leaves, strict=True)]
            return i + 1, list(map(tf.add, sums, more.leaves)), written

        _, sums, parts = tf.while_loop(lambda i, *_: i < number, body, (1, summed.leaves, parts), parallel_iterations=1)
        return summed.rebuild(sums), outputs.rebuild([part.concat() for part in parts])

    def kept(self, programs: Programs, setting: object, run: Run, axes: Axes, args: Args) -> Made:
        # The graph of a loop would contain the function once for each example.
        return by_program(programs, setting, run, args) if self.keeps_whole_batches else run(*args)


class TensorFlowGradient:
    """A function that returns `(transform(gradient), (value, aux))` for a `fun` that returns `(value, aux)`.

    `unused` holds the names of the parameters that no call has used so far. It is None before the first call.
    """

    def __init__(self, fun: Function, argnums: int | tuple[int, ...], transform: Transform | None = None) -> None:
        self._fun = fun
        self._argnums = argnums
        self._transform = transform
        self.unused: set[str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        several = self._argnums if isinstance(self._argnums, tuple) else (self._argnums,)
        flats = {i: flatten(mapped(_tensor, args[i])) for i in several}
        given = [flats[i].rebuild(flats[i].leaves) if i in flats else arg for i, arg in enumerate(args)]
        leaves = {f"argument {i}{path}": leaf for i, flat in flats.items() for path, leaf in _by_path(flat)}
        _check_parameters(leaves)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(leaves.values()))
            with _reading_explained():
                value, aux = self._fun(*given, **kwargs)
            value = _loss(value)
        found = dict(zip(leaves, tape.gradient(value, list(leaves.values())), strict=True))
        unused = {name for name, grad in found.items() if grad is None}
        self.unused = unused if self.unused is None else self.unused & unused
        dense = (tf.zeros_like(leaves[name]) if grad is None else _tensor(grad) for name, grad in found.items())
        grads = [flats[i].rebuild([next(dense) for _ in flats[i].leaves]) for i in several]
        gradient = tuple(grads) if isinstance(self._argnums, tuple) else grads[0]
        return gradient if self._transform is None else self._transform(gradient), (value, aux)


class TensorFlowLoop(TensorFlowBatching):
    """`Batching` with a loop over the examples, for functions that `tf.vectorized_map` cannot handle."""

    keeps_whole_batches = False

    def _over_rows(self, of_rows: Callable[..., list[tf.Tensor]], leaves: list[tf.Tensor]) -> list[tf.Tensor]:
        # `leaf[i]` may share the batch's memory, aligned by its place. `tf.gather` always copies.
        found = [of_rows([tf.gather(leaf, i) for leaf in leaves]) for i in range(leaves[0].shape[0])]
        return [tf.stack(parts) for parts in zip(*found, strict=True)]


def _seeds(seed: tf.Tensor, count: int) -> tf.Tensor:
    """Return `tf.random.fold_in(seed, i)` for each i below `count`, in one tensor."""
    of_all = tf.random.fold_in(seed, tf.zeros([], seed.dtype))[0]
    return tf.stack([tf.fill([count], of_all), tf.range(count, dtype=seed.dtype)], axis=1)


def _tensor(x: object) -> Any:
    return tf.convert_to_tensor(x)


def _by_path(flat: FlatTree) -> Iterable[tuple[str, Any]]:
    return zip(flat.paths(), flat.leaves, strict=True)


def _check_parameters(leaves: Mapping[str, tf.Tensor]) -> None:
    """Raise a TypeError if a parameter has no derivative. A tape would return zeros for it."""
    for name, leaf in leaves.items():
        if not (leaf.dtype.is_floating or leaf.dtype.is_complex):
            raise TypeError(
                f"{name} has dtype {leaf.dtype.name}, which has no gradient. Pass floating-point parameters."
            )


def _loss(value: object) -> tf.Tensor:
    """Return the loss of one example as a scalar tensor. A tape would silently sum a loss with more elements."""
    loss = _tensor(value)
    if not loss.dtype.is_floating:
        raise TypeError(f"the loss must return a real floating-point number, got {loss.dtype.name}.")
    return loss


@contextmanager
def _reading_explained() -> Iterator[None]:
    """Add to errors of a function that reads values while its graph is recorded what to write instead."""
    try:
        yield
    except (AttributeError, TypeError, NotImplementedError) as error:
        if not tf.executing_eagerly() and "symbolic" in str(error).lower():
            error.add_note(
                "gradclip has TensorFlow record the loss as a graph, so it must not read values. Return the tensor "
                'without .numpy() or float(), and write tf.where or tf.cond for `if`. Or pass method="loop" to run '
                "one example at a time, eagerly."
            )
        raise


def _on_rows(fun: Function, flats: Sequence[FlatTree | None], args: Args, rows: Sequence[tf.Tensor]) -> Any:
    """Call the function with the arguments. Those that are flat trees get their leaves from `rows`."""
    rest = iter(rows)
    given = [
        arg if flat is None else flat.rebuild([next(rest) for _ in flat.leaves])
        for flat, arg in zip(flats, args, strict=True)
    ]
    return fun(*given)


def by_program(programs: Programs, setting: object, run: Run, args: Args) -> Made:
    """Return `run(*args)`, a tree of tensors and a list of dtypes. Reuse a recorded graph if possible.

    `run` is called without a graph of its own while TensorFlow records, and for mutable objects.
    """
    flat, fixed = flatten(list(args)), flatten(setting).leaves
    key = _key(flat, setting, fixed) if tf.executing_eagerly() else None
    if key is None:
        return run(*args)
    if key not in programs:
        programs.keep(key, _ConcreteFunction(run, flat))
    return programs[key](_tensors(flat))


class _ConcreteFunction:
    """A graph of a function of the arrays among its arguments. Results that are not tensors are stored separately."""

    def __init__(self, run: Run, flat: FlatTree) -> None:
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
    constants = [named(x) for x in (*flat.leaves, *fixed) if not isinstance(x, _ARRAYS)]
    # `run` uses its own settings. If one of them is an array, a graph would keep its current values forever.
    if None in constants or any(isinstance(x, _ARRAYS) for x in fixed):
        return None
    places = tuple(isinstance(x, _ARRAYS) for x in flat.leaves)
    dtypes = tuple((x.dtype, tuple(x.shape)) for x in flat.leaves if isinstance(x, _ARRAYS))
    try:
        key = (flat.structure, places, dtypes, tuple(constants), repr(setting))
        hash(key)
    except TypeError:
        return None
    return key
