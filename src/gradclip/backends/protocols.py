"""What the core asks of a backend: small protocols, the only place where each is described.

`Backend` is all that the core may use of any framework, `HostBackend` what only those have whose arrays lie in host
memory. Beside each class that keeps this word, one line lets mypy check that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    import numpy as np

    from gradclip.backends.arrays import Arrays
    from gradclip.backends.formats import Format
    from gradclip.backends.host.arrays import HostArray, HostArrays
    from gradclip.backends.memory import Region
    from gradclip.backends.values import Array, AtOnce, Axes, Scope
    from gradclip.core.coefficient import Coefficient
    from gradclip.core.rules import Rule
    from gradclip.native._kernels import Arrays as KernelArrays


class Arithmetic(Protocol):
    """What numbers a backend computes with, and scalars of them: norms, thresholds, coefficients."""

    xp: ModuleType
    """The operations of the array API standard."""
    wide: Format
    """The format that sums run in: float64 where the device has it."""
    concrete: bool
    """Whether values lie in host memory, so that a look at them costs nothing."""
    visible: bool
    """Whether values can be looked at, if only by waiting for a device."""
    splits_by_range: bool
    """Whether arrays whose powers may leave the range are better not summed with the others."""

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which `wide` may be used."""

    def scalar(self, value: float | Array, near: Sequence[Array]) -> Array:
        """Return a number as a wide scalar on the device of the arrays."""

    def single(self, value: Array) -> Array:
        """Return a wide scalar, or a vector, in float32, the format of narrow leaves' products."""

    def booleans(self, mask: object) -> Array:
        """Return a mask as a boolean array."""

    def zeros(self, shape: tuple[int, ...], near: Sequence[Array]) -> Array:
        """Return wide zeros on the device of the arrays."""

    def gather(self, terms: Sequence[Array]) -> list[Array]:
        """Return scalars, or vectors, that may live on several devices, where they can be put together."""

    def total(self, terms: Sequence[Array]) -> Array:
        """Return the sum of scalars, or of vectors."""

    def stacked(self, scalars: Sequence[Array]) -> Array:
        """Return scalars as a vector."""

    def unstacked(self, vectors: Sequence[Array]) -> list[list[Array]]:
        """Return the entries of each vector as scalars."""

    def chosen_where(self, flags: Array, compute: Callable[[], tuple[Array, Array]], found: tuple[Array, Array]) -> Any:
        """Return a pair of wide scalars, or vectors: what `compute` returns where it is flagged, elsewhere `found`."""


class Enter(Protocol):
    """From what users pass to arrays."""

    def plain(self, leaves: Sequence[Any]) -> bool:
        """Say whether the kernels can read these: plain numbers in host memory, of which no derivative is asked for."""

    def prepare(self, leaf: object) -> Any:
        """Return a leaf as an array that can be clipped, integers promoted to the default float."""

    def enter(self, prepared: Sequence[Any]) -> Arrays:
        """Return prepared leaves as the arrays that the operations take."""

    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> Arrays:
        """Return some of the arrays, which share their memory."""

    def patterns(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return what `leave_all` and `leave_scalar` have to know of the leaves, without arrays that are traced."""


class Reduce(Protocol):
    """From arrays to norms: a number for all of them, or one for each norm of a scope."""

    def with_care(self, compute: Callable[[Any], Any], arrays: Arrays, count: int) -> Any:
        """Return what `compute` makes of a backend, a norm of `count` elements and its divisor, so that it is right."""

    def flushed_below(self, element: Format) -> float:
        """Return the magnitude below which an element may be read as zero, 0.0 where it never is."""

    def sum_error(self, count: int, arrays: Arrays, p: float, scope: Scope) -> float:
        """Return a bound on the relative error that additions make in a sum of `count` powers of the elements."""

    def power_sum(self, arrays: Arrays, p: float, scope: Scope, divisor: Array | None = None) -> Array:
        """Return the sum of (|x| / divisor)**p over all arrays, for each norm of the scope."""

    def scaled_power_sum(self, arrays: Arrays, p: float, scope: Scope) -> tuple[Array, Array]:
        """Return power sums whose terms could leave the range, and their divisors; None is 1."""

    def largest(self, arrays: Arrays, scope: Scope) -> Array:
        """Return the largest magnitude, NaN where one is NaN."""

    def smallest(self, arrays: Arrays, scope: Scope) -> Array:
        """Return the smallest magnitude, NaN where one is not finite."""

    def norm_at_once(self, arrays: Arrays, p: float) -> Array | None:
        """Return the norm of all arrays, where a device finds it without sums of powers; else None."""

    def norms_of(self, arrays: Arrays, p: float) -> tuple[Array, Array | None] | None:
        """Return the norm of each array, and its divisor, as vectors, where few operations give all; else None."""

    def quartered(self, arrays: Arrays) -> Arrays:
        """Return a quarter of each of the arrays, in the wide format."""

    def count_nonfinite(self, x: Any) -> tuple[int, int]:
        """Return how many elements are NaN and how many infinite: this waits for the values."""

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        """Return the arrays with zeros in place of NaN and the infinities."""


class Scale(Protocol):
    """From arrays to smaller ones. No element exceeds the exact product."""

    def at_once(self, arrays: Arrays) -> AtOnce | None:
        """Return what multiplies the arrays by one number; None where each is better scaled by itself."""

    def shrink(self, arrays: Arrays, coefficient: Coefficient, scope: Scope) -> list[Any]:
        """Return the arrays scaled by the coefficient, which has an entry for each norm."""

    def shrink_each(self, arrays: Arrays, coefficients: Sequence[Coefficient], scope: Scope) -> list[Any]:
        """Return the arrays, each scaled by a coefficient of its own."""

    def clamped_all(self, prepared: Sequence[Any], leaves: Sequence[Any], bound: float | Array) -> list[Any]:
        """Return the leaves, prepared, with each element in [-bound, bound], the bound rounded toward zero."""

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return the function of leaves, a threshold and a mask with the derivative that the rule gives it."""


class Batch(Protocol):
    """Sums over a batch of examples, which lie along the first axis."""

    def examples_error(self, count: int) -> float:
        """Return a bound on the relative error of a sum of `count` squares by `add_examples`."""

    def weighs_all(self, arrays: Arrays) -> bool:
        """Say whether `add_examples` is right for all finite examples, whatever their magnitude."""

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: Array | None, *, spoil: bool
    ) -> tuple[list[Any], Array] | None:
        """Return weighted sums over examples and the norm of each, 0 outside of `mask`; None where it cannot.

        One that is not finite adds nothing, or makes the sums NaN if it is to `spoil` them.
        """

    def zeroed(self, arrays: Arrays) -> Arrays:
        """Return the arrays as `without_nonfinite` does, for norms and weighted sums of examples alone."""

    def weighted_sums(self, arrays: Arrays, coefficient: Coefficient) -> list[Array]:
        """Return the sum over the first axis of each array, each example times its own coefficient, wide."""

    def rounded_sum(self, x: Any, coefficient: Coefficient) -> Array:
        """Return the sum over the first axis of each example times its own coefficient, rounded to integers, int64."""


class Leave(Protocol):
    """From results to what users get: the framework's own."""

    def leave(self, array: Any, leaf: Any) -> Any:
        """Return one result as what the user passed: a new array like the leaf, a number for a number."""

    def leave_all(self, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]:
        """Return results as what the user passed."""

    def leave_scalar(self, value: Array, dtype: str, leaves: Sequence[Any]) -> Any:
        """Return a wide scalar, or an array with one entry for each norm, in the named dtype."""

    def leave_count(self, flags: Array, leaves: Sequence[Any]) -> Any:
        """Return how many flags, one for each example of the leaves, are set, as an integer scalar."""

    def check_sum_dtype(self, dtype: str | None) -> None:
        """Raise a ValueError where sums cannot be handed out in a dtype."""

    def leave_sums(self, wides: Sequence[Array], arrays: Sequence[Array], dtype: str | None) -> list[Any]:
        """Return sums over examples of arrays in a dtype; None is float32 unless an array has float64 precision."""


class InPlace(Protocol):
    """Gradients that are changed where they lie."""

    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Arrays:
        """Return gradients as arrays that share their memory. Raises TypeError for those that cannot be clipped."""

    def region(self, leaf: object) -> Region | None:
        """Return where a gradient lies, None where it shares its memory with no other that can be written."""

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        """Say whether two gradients may share memory, quickly, True where in doubt; `arrays` are these gradients."""

    def writable(self, leaf: object) -> bool:
        """Say whether a gradient can be written where it lies."""

    def can_write(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        """Say whether all gradients can surely be written where they lie; `arrays` are these gradients."""

    def update(
        self, leaves: Sequence[Any], arrays: Arrays, new: Arrays, coefficient: Coefficient, scope: Scope
    ) -> Sequence[Any]:
        """Scale the gradients `leaves`, which are `arrays`, from `new` on; return them, or others that replace them."""

    def update_clamped(self, leaves: Sequence[Any], arrays: Arrays, bound: float | Array) -> Sequence[Any]:
        """Clamp the gradients `leaves`, which are `arrays`; return them, or others that replace them."""


class Held(Protocol):
    """Arrays of which several devices hold parts, and layers whose norms can be one vector."""

    def together(self, arrays: Sequence[Any]) -> Hashable | None:
        """Return a key that layers share if their norms can be one vector; None where each is better taken alone."""

    def over(self, axis_name: Hashable) -> tuple[Backend, Axes]:
        """Return the backend for shards over axes of a mesh, and the axes. Raises TypeError where there are none."""

    def on_each_device(self, arrays: Arrays) -> Callable[..., Any] | None:
        """Return what calls a function on each device; None if that is not to be done.

        The function takes the backend there, the axes of the mesh and this device's shards, and returns scalars.
        """


class Backend(Arithmetic, Enter, Reduce, Scale, Batch, Leave, InPlace, Held, Protocol):
    """What the core asks of a framework."""


class HostBackend(Backend, Protocol):
    """What only backends of arrays in host memory offer: the kernels, many layers in one call."""

    def enter(self, prepared: Sequence[Any]) -> HostArrays:
        """Return prepared leaves as arrays of which the kernels know those that they can read."""

    def known(self, leaves: Sequence[Any]) -> KernelArrays | None:
        """Return how the kernels know leaves as they are; None where they do not know all of them."""

    def new_like(self, leaves: Sequence[Any], *, copied: bool) -> list[Any]:
        """Return new leaves, copies or with any values, in the same order in memory."""

    def number(self, value: float, dtype: str) -> Any:
        """Return a number as a scalar of the framework."""

    def array(self, values: np.ndarray | np.generic, dtype: str) -> Any:
        """Return numbers as a new array of the framework in the named dtype."""

    def wrote(self, leaves: Sequence[Any]) -> None:
        """Take note that gradients have been written behind their framework's back."""

    def threads(self) -> int:
        """Return how many threads a call may use."""

    def places_for(self, arrays: Arrays) -> tuple[list[Any], Any]:
        """Return new arrays for results, and how the kernels know them; None if they lie in another order."""

    def copies(self, arrays: Arrays) -> list[Any]:
        """Return copies of the arrays, in the same memory orders."""

    def entered_copies(self, copies: Sequence[Any]) -> HostArrays:
        """Return what `copies` has returned as arrays, which share its memory."""

    def lie_writable(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        """Say whether gradients, which are `arrays`, may be written in the memory of these."""

    def put(self, leaf: Any, x: HostArray, result: HostArray | np.ndarray) -> Any:
        """Write a result where the gradient `leaf`, which is `x`, lies, or return another that replaces it."""

    def leave_scalars(self, values: Array, dtype: str, leaves: Sequence[Any]) -> list[Any]:
        """Return each entry of a wide vector in the named dtype; `leaves` holds a list of leaves for each."""

    def leave_vectors(self, values: Sequence[np.ndarray], dtype: str, leaves: Sequence[Any]) -> list[Any]:
        """Return wide arrays in the named dtype, each as the leaf beside it is."""


def in_host_memory(backend: Backend) -> TypeGuard[HostBackend]:
    """Say whether the backend's arrays lie in host memory."""
    return backend.concrete
