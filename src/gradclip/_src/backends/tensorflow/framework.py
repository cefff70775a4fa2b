"""The TensorFlow entry for the registry, and the backend for eager tensors and variables on the CPU, as host memory.

Tensors are never written. Results are new tensors, in memory that NumPy allocated, or the tensors themselves if nothing
changes. In-place calls change variables through TensorFlow's `assign`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor  # the type of eager tensors has no public name

from gradclip._src import native
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray, HostArrays, aligned_empty, is_aligned
from gradclip._src.backends.host.backend import ImmutableHost, dtype_named
from gradclip._src.backends.host.laid import indices_written
from gradclip._src.backends.tensorflow import namespace
from gradclip._src.backends.tensorflow.derivative import asked, call_as_asked
from gradclip._src.backends.tensorflow.trees import TENSORFLOW_TREES, TensorFlowTrees
from gradclip._src.core.arrays import Arrays, checked_dtype
from gradclip._src.core.formats import BFLOAT16, bare_name, dtype_name
from gradclip._src.core.layouts import Layout
from gradclip._src.core.protocols import Backend, HostBackend
from gradclip._src.core.rules import Into
from gradclip._src.tree import Sparse

if TYPE_CHECKING:
    from gradclip._src.native._kernels import Arrays as KernelArrays


FLOATING = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128}
_LARGE = 1 << 16  # bytes; below this, a TensorFlow operation costs more than allocating memory
_FIRST_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_FEW = 16


class TensorFlowHost(ImmutableHost):
    """Eager tensors, viewed as NumPy arrays."""

    immutable = True

    def threads(self) -> int:
        return _threads()

    def plain(self, leaves: Sequence[Any]) -> bool:
        return super().plain(leaves) and not asked(leaves)

    def prepare(self, leaf: Any) -> tf.Tensor:
        return leaf if type(leaf) is EagerTensor and leaf.dtype in FLOATING else checked_dtype(tensor_of(leaf))

    def prepare_in_place(self, leaf: object) -> tf.Tensor:
        return tensor_of(leaf)

    def enter(self, prepared: Sequence[tf.Tensor]) -> HostArrays:
        return HostArrays(prepared, viewed, described(prepared))

    def arrays_of(self, leaves: Sequence[Any], kernels: KernelArrays) -> HostArrays:
        return HostArrays(leaves, viewed, native.Described(kernels, ()))

    def known(self, leaves: Sequence[Any]) -> KernelArrays | None:
        # Results for tensors on other devices would have to be copied there.
        if not all_tensors_on_cpu(leaves) or not {leaf.dtype for leaf in leaves} <= FLOATING:
            return None
        kernels, left_out = described(leaves)
        return None if left_out else kernels

    def new_like(self, leaves: Sequence[tf.Tensor], *, copied: bool) -> list[Any]:
        return list(leaves) if copied else [_new_tensor(leaf) for leaf in leaves]

    def number(self, value: float, dtype: str) -> tf.Tensor:
        return taken_over(np.array(value, dtype), dtype)

    def array(self, values: np.ndarray | np.generic, dtype: str) -> tf.Tensor:
        return taken_over(np.asarray(values.astype(dtype)), dtype)

    def empty_like(self, x: HostArray) -> HostArray:
        return new_like(x)

    def copies(self, arrays: Arrays) -> list[HostArray]:
        return self._filled_copies(arrays)  # their memory is from `empty_like`

    def leave(self, array: Any, leaf: object) -> tf.Tensor:
        return placed(taken_over(array.data, array.dtype) if array.origin is None else array.origin, leaf)

    def leave_sum(self, wide: np.ndarray, x: HostArray, dtype: str | None) -> tf.Tensor:
        return _of_numpy(super().leave_sum(wide, x, dtype))

    def leave_count(self, flags: Any, leaves: Sequence[Any]) -> tf.Tensor:
        return placed(_of_numpy(super().leave_count(flags, leaves)), leaves[0] if leaves else None)

    def leave_scalar(self, value: Any, dtype: str, leaves: Sequence[Any]) -> tf.Tensor:
        return placed(_of_numpy(super().leave_scalar(value, dtype, leaves)), leaves[0] if leaves else None)

    def leave_each(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[tf.Tensor]:
        if not isinstance(values, np.ndarray):
            return [self.leave_scalar(value, dtype, [leaf]) for value, leaf in zip(values, leaves, strict=True)]
        # Unstacking one vector is faster than making one tensor per entry, except for few entries.
        few = len(values) < _FEW
        made = [self.number(x, dtype) for x in values] if few else tf.unstack(self.array(values, dtype))
        # A layer may be a list of leaves. Its norm goes to the device of the first.
        first = [leaf[0] if isinstance(leaf, list) and leaf else leaf for leaf in leaves]
        return list(map(placed, made, first))

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        return partial(call_as_asked, function, rule)

    def writable(self, leaves: Sequence[Any]) -> bool:
        return all(isinstance(leaf, tf.Variable) for leaf in leaves)

    def put(self, leaf: Any, x: HostArray, result: HostArray | np.ndarray) -> Any:
        made = self.leave(result, leaf)
        if not self.writable([leaf]):
            return made
        leaf.assign(made, read_value=False)
        return leaf

    def scale(self, arrays: Arrays, coefficient: Any, layout: Layout, into: Into | None = None) -> Sequence[Any]:
        if into is None or into.leaves is None:
            return super().scale(arrays, coefficient, layout, into)
        if not indices_written(into.arrays, arrays, coefficient, layout):
            return into.leaves
        return self.write(self.shrink(arrays, coefficient, layout), into)

    def clamp(self, arrays: Arrays, bound: Any, into: Into | None = None) -> Sequence[Any]:
        results = super().clamp(arrays, bound)
        return results if into is None else self.write(results, into)

    def write(self, results: Sequence[HostArray], into: Into) -> list[Any]:
        # Variables are assigned to, and tensors replaced. Leaves that have not changed stay.
        updated = list(into.leaves)
        for index, (leaf, x, y) in enumerate(zip(updated, into.arrays, results, strict=True)):
            if not np.array_equal(x.data, y.data):
                updated[index] = self.put(leaf, x, y)
        return updated


_checked: type[HostBackend] = TensorFlowHost


def tensor_of(leaf: Any) -> Any:
    """Return a leaf as a tensor: a variable as its value, a number as float32 or complex64."""
    if isinstance(leaf, tf.Tensor):
        return leaf
    if isinstance(leaf, tf.IndexedSlices):
        raise TypeError(
            "a tf.IndexedSlices is not supported here. Pass tf.convert_to_tensor(x), or clip it as a leaf of a tree, "
            "for example with gradclip.clip_by_global_norm."
        )
    if isinstance(leaf, int | float | complex):
        return tf.constant(leaf, tf.complex64 if isinstance(leaf, complex) else tf.float32)
    return tf.convert_to_tensor(leaf)


def in_host_memory(array: Any) -> bool:
    """Say whether an array's values are in host memory."""
    device = array.device
    return device == _FIRST_CPU or "device:CPU:" in device


def all_tensors_on_cpu(leaves: Sequence[Any]) -> bool:
    """Say whether all leaves are eager tensors on the first CPU device."""
    return set(map(type, leaves)) == {EagerTensor} and all(leaf.device == _FIRST_CPU for leaf in leaves)


def described(tensors: Sequence[tf.Tensor]) -> native.Described:
    """Describe CPU tensors to the kernels."""
    return native.describe_buffers([_bits(x) if x.dtype is tf.bfloat16 else x for x in tensors])


def viewed(tensor: tf.Tensor) -> HostArray:
    """Return a view of a tensor's memory."""
    data = _bits(tensor) if tensor.dtype is tf.bfloat16 else np.asarray(tensor)
    return HostArray(data, tensor.dtype.name, origin=tensor)


def _bits(tensor: tf.Tensor) -> np.ndarray:
    # For a bfloat16 scalar, NumPy would return a number, which is a copy.
    view = np.asarray(tensor if tensor.ndim else tf.bitcast(tensor, tf.uint16)).view(np.uint16)
    view.flags.writeable = False  # like the views of other dtypes
    return view


def taken_over(data: np.ndarray, dtype: str) -> tf.Tensor:
    """Return a tensor of a new array in the named dtype (bfloat16: of its bits). It shares the memory if possible."""
    # TensorFlow kills the process if the memory is not aligned.
    if not (is_aligned(data) and data.flags.c_contiguous and data.flags.writeable):
        copy = aligned_empty(data.shape, data.dtype)
        copy[...] = data
        data = copy
    return over(data, dtype)


def over(data: np.ndarray, dtype: str) -> tf.Tensor:
    """Do the same as `taken_over`, for an array that is known to be aligned."""
    tensor = tf.experimental.dlpack.from_dlpack(data.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if dtype == BFLOAT16.name else tensor


def new_like(x: HostArray) -> HostArray:
    """Return an array for a result. Its `origin` is a tensor, or a tensor can be made from it without a copy."""
    if x.data.nbytes < _LARGE:
        return HostArray(aligned_empty(x.shape, x.data.dtype), x.dtype)
    # TensorFlow reuses its freed memory. Fresh pages from the system would take longer than everything else here.
    with tf.device(_FIRST_CPU):
        tensor = tf.raw_ops.Empty(shape=x.shape, dtype=x.dtype)
    return HostArray(np.asarray(_Writable(tensor)), x.dtype, origin=tensor)


class _Writable:
    """Writable access to the memory of a new tensor that nothing else uses yet."""

    def __init__(self, tensor: tf.Tensor) -> None:
        interface = viewed(tensor).data.__array_interface__
        self.tensor = tensor  # keeps the memory alive
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def placed(tensor: tf.Tensor, leaf: Any) -> tf.Tensor:
    """Copy a result to the device of its leaf, if that is a different device."""
    device = getattr(leaf, "device", None) or _FIRST_CPU
    if device == _FIRST_CPU:
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def _new_tensor(leaf: tf.Tensor) -> tf.Tensor:
    made = new_like(viewed(leaf))
    return over(made.data, made.dtype) if made.origin is None else made.origin


def _of_numpy(value: Any) -> tf.Tensor:
    return taken_over(np.asarray(value), dtype_name(value))


@cache
def _threads() -> int:
    # Use no more threads than TensorFlow: the user may have limited them, and the limit is fixed once TensorFlow runs.
    limit = tf.config.threading.get_intra_op_parallelism_threads()
    return min(limit, native.default_threads()) if limit else native.default_threads()


HOST = TensorFlowHost()


class TensorFlow(Framework):
    """TensorFlow tensors and variables on any device, and symbolic tensors in graphs."""

    namespace = namespace

    @property
    def trees(self) -> TensorFlowTrees:
        return TENSORFLOW_TREES

    def backend(self, leaves: Sequence[Any], scalars: Sequence[Any]) -> Backend:
        arrays = [x for x in (*leaves, *scalars) if isinstance(x, tf.Tensor | tf.Variable)]
        eager = tf.executing_eagerly() and not any(map(tf.is_symbolic_tensor, arrays))
        if eager and all(map(in_host_memory, arrays)):
            return HOST
        if not eager and not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 1 graphs are not supported: they compare tensors by identity. Clip eagerly, or "
                "in tf.function."
            )
        from gradclip._src.backends.tensorflow.graph import Graph  # not needed for trees in host memory

        return Graph(visible=eager)

    def on_fast_path(self, leaves: Sequence[Any]) -> TensorFlowHost | None:
        # `known` checks the other leaves.
        return HOST if type(leaves[0]) is EagerTensor and tf.executing_eagerly() else None

    def on_host(self, leaf: Any) -> HostArray:
        return viewed(tensor_of(leaf))

    def number(self, scalar: Any) -> Any:
        return scalar.numpy().item()

    def kept(self, array: Any) -> tf.Tensor:
        return tf.convert_to_tensor(array)  # a variable becomes its value

    def beside(self, array: Any, like: Any) -> tf.Tensor:
        return placed(tf.stop_gradient(array), like)

    def is_traced(self, array: object) -> bool:
        # In a graph, the value of a variable is symbolic too.
        return tf.is_symbolic_tensor(array) or (isinstance(array, tf.Variable) and not tf.executing_eagerly())

    generator = "a tf.random.Generator"

    def noised(self, leaves: Sequence[Any], std: float, rng: Any) -> list[tf.Tensor] | None:
        if not isinstance(rng, tf.random.Generator):
            return None

        def noised(x: Any) -> tf.Tensor:
            wide = tf.float64 if x.dtype == tf.float64 else tf.float32
            return tf.cast(tf.cast(x, wide) + rng.normal(tf.shape(x), stddev=std, dtype=wide), x.dtype)

        return [noised(x) for x in leaves]

    def like(self, leaf: Any, dtype: str, values: np.ndarray) -> tf.Tensor:
        made = np.asarray(values.astype(dtype_named(dtype)))
        bits = made.view(np.uint16) if dtype == BFLOAT16.name else made
        return placed(taken_over(bits, dtype), leaf)

    def zeros(self, shape: tuple[int, ...], leaf: Any) -> tf.Tensor:
        return self.like(leaf, bare_name(leaf.dtype), np.zeros(shape))

    def as_float(self, array: object) -> tf.Tensor:
        return tf.cast(array, tf.float32)

    def first_sparse(self, leaves: Sequence[Any]) -> Sparse | None:
        return next((TENSORFLOW_TREES.described(i, leaf) for i, leaf in TENSORFLOW_TREES.sparse(leaves).items()), None)

    def lies_itself(self, array: object) -> bool:
        return isinstance(array, tf.Variable)

    def may_be_weights(self, array: object) -> bool:
        return isinstance(array, tf.Variable) and array.trainable


TENSORFLOW = TensorFlow()
