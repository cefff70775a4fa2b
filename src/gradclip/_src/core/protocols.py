"""What the core asks of a backend, in small protocols. Only they and `values` document the methods.

`Backend` is everything the core may use with any framework. `HostBackend` adds what only backends with
arrays in host memory offer. Each implementation has a line next to it that lets mypy check the class
against its protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import Format
from gradclip._src.core.layouts import Layout
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.rules import Coefficient, Into, OneFactor, Rule
from gradclip._src.core.values import Arithmetic, Array

if TYPE_CHECKING:
    import numpy as np


class Enter(Protocol):
    """Convert what users pass to arrays."""

    def plain(self, leaves: Sequence[Any]) -> bool:
        """Say whether the kernels can read these leaves: plain numbers in host memory that need no derivative."""

    def prepare(self, leaf: object) -> Any:
        """Return a leaf as an array that can be clipped. Raises TypeError for other dtypes."""

    def enter(self, prepared: Sequence[Any]) -> Arrays:
        """Return prepared leaves as the `Arrays` that the operations take."""

    def chosen(self, arrays: Arrays, indices: Sequence[int]) -> Arrays:
        """Return some of the arrays, without copying."""

    def types_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return what `leave_all` and `leave_scalar` need to know about the leaves, without keeping traced arrays."""


class Reduce(Protocol):
    """Reduce arrays to norms: one number for all of them, or one for each norm of a layout."""

    def norms(self, arrays: Arrays, order: Order, layout: Layout | None = None) -> Norm:
        """Return the norm of all elements, or each norm of the layout, with a proven error.

        The layout is a `Scope`, or consecutive `Groups` of all arrays; on a `concrete` backend any. There, of several
        norms the result may say that some are not `sure`.
        """

    def floor(self, arrays: Arrays, count: int, order: Order) -> float:
        """Return the most that `count` elements add to a norm if they are read as zero or their sizes are rounded."""

    def count_nonfinite(self, x: Any) -> tuple[int, int]:
        """Return the numbers of NaN and of infinite elements. This waits for the values."""

    def without_nonfinite(self, arrays: Arrays) -> Arrays:
        """Return the arrays with NaN and infinities replaced by zeros."""


class Scale(Protocol):
    """Scale arrays down, or clamp them. No result exceeds the exact product.

    Results are new arrays; with `into` they are its leaves, or replacements of those that cannot be written.
    """

    def multi_tensor(self, arrays: Arrays) -> Mapping[Format, int] | None:
        """Return the number of elements of each format, the widest first, if one number can multiply all at once.

        None if scaling them one by one is better.
        """

    def scale(
        self, arrays: Arrays, coefficient: Coefficient | OneFactor, layout: Layout, into: Into | None = None
    ) -> Sequence[Any]:
        """Return the arrays scaled by the coefficient, which has an entry for each norm of the layout.

        The layout is as in `norms`. With `into`, only the values come from the arrays.
        """

    def clamp(self, arrays: Arrays, bound: float | Array, into: Into | None = None) -> Sequence[Any]:
        """Return the arrays with elements clamped to [-bound, bound], the bound rounded toward zero."""

    def differentiable(self, function: Callable[..., Any], rule: Any) -> Callable[..., Any]:
        """Return the function of leaves, threshold and mask with the derivative defined by the rule."""


class ExampleSums(Protocol):
    """Sums over a batch of examples. The examples are along the first axis."""

    def examples_error(self, arrays: Arrays, count: int) -> float | None:
        """Return a bound on the relative error of a sum of `count` squares in `add_examples`.

        None if values cannot be read and the sums of some finite examples may be wrong, by their magnitude.
        """

    def add_examples(
        self, arrays: Arrays, weighing: Rule, mask: Array | None, *, spoil: bool
    ) -> tuple[list[Any], Array] | None:
        """Return the weighted sums over examples and each example's norm, or None if not supported.

        Norms outside `mask` are 0. A non-finite example adds nothing, or, with `spoil`, makes the sums NaN.
        """

    def zeroed(self, arrays: Arrays) -> Arrays:
        """Like `without_nonfinite`, but only for norms and weighted sums of examples."""

    def weighted_sums(self, arrays: Arrays, coefficient: Coefficient, *, integers: bool = False) -> list[Array]:
        """Return each array's sum over the first axis, each example times its own coefficient, in the wide format.

        As `integers`, each product is rounded to one, and the sum is int64.
        """


class Leave(Protocol):
    """Convert results to what users get: the framework's own types."""

    def leave_all(self, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]:
        """Return results in the form the user passed: new arrays like the leaves, or numbers for numbers."""

    def leave_scalar(self, value: Array, dtype: str, leaves: Sequence[Any]) -> Any:
        """Return a wide scalar, or an array with one entry for each norm, in the named dtype, near the leaves."""

    def leave_count(self, flags: Array, leaves: Sequence[Any]) -> Any:
        """Return the number of set flags (one for each example) as an integer scalar."""

    def check_sum_dtype(self, dtype: str | None) -> None:
        """Raise a ValueError if sums cannot be returned in this dtype."""

    def leave_sums(self, wides: Sequence[Array], arrays: Sequence[Array], dtype: str | None) -> list[Any]:
        """Return sums over examples in a dtype. None means float32, or float64 for arrays with float64 precision."""


class InPlace(Protocol):
    """Change gradients in place."""

    def enter_in_place(self, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Arrays:
        """Return gradients as arrays that share their memory. Raises TypeError for gradients that cannot be clipped."""

    def meeting(self, leaves: Sequence[Any], owners: Sequence[Any]) -> list[list[int]]:
        """Return the indices of gradients that share memory, a list for each set, the largest gradient first.

        `owners` hold the gradients in `.grad`.
        """

    def write_back(self, leaf: Any, copy: Any) -> None:
        """Write the values of a copy into its gradient, which is writable."""

    def collide(self, leaves: Sequence[Any], arrays: Arrays) -> bool:
        """Say quickly whether two gradients may share memory. True in case of doubt. `arrays` are these gradients."""

    def writable(self, leaves: Sequence[Any]) -> bool:
        """Say whether all gradients can be written in place."""

    def clear(self, arrays: Arrays) -> None:
        """Replace NaN and infinities by zeros in place, in writable arrays that `multi_tensor` knows."""


class Sharded(Protocol):
    """Arrays sharded over several devices, and layers whose norms can be computed as one vector."""

    def vectorisable_with(self, arrays: Sequence[Any]) -> Hashable | None:
        """Return a key shared by layers whose norms can be one vector, or None if each is better measured alone."""

    def mesh(self, axis_name: Hashable) -> tuple[Backend, Axes]:
        """Return the backend for shards over mesh axes, and the axes. Raises TypeError if the framework has no mesh."""

    def on_each_device(self, arrays: Arrays) -> Callable[..., Any] | None:
        """Return what runs a function on each device, or None if that is not needed or possible.

        The function takes the backend on the device, the mesh axes and the device's shards, and returns scalars.
        """


class Backend(Arithmetic, Enter, Reduce, Scale, ExampleSums, Leave, InPlace, Sharded, Protocol):
    """Everything the core asks of a framework."""


class Axes(Protocol):
    """Mesh axes over which arrays are sharded, in code that runs on each device's own shards."""

    def count(self) -> int:
        """Return the number of devices along the axes."""

    def groups(self, arrays: Arrays) -> list[Arrays]:
        """Return lists of arrays, one list for each set of axes over which arrays are sharded."""

    def total(self, terms: Sequence[Any]) -> Any:
        """Return the sum of all devices' terms. A replicated term counts once."""

    def largest(self, terms: Sequence[Any]) -> Any:
        """Return the largest of all devices' terms."""


class HostBackend(Backend, Protocol):
    """What only backends whose arrays are in host memory offer, where reading values costs nothing."""

    immutable: bool
    """Whether `new_like` returns an array itself as its copy."""

    def take(self, leaves: Sequence[Any]) -> Arrays:
        """Return leaves as `enter` returns prepared ones. Raises TypeError for dtypes that cannot be clipped."""

    def at_most(self, arrays: Arrays, p: float, max_norm: float, part: tuple[Any, ...] | None = None) -> bool:
        """Say in exact arithmetic whether the norm of all arrays, or of one array's `part`, is at most `max_norm`.

        `part` is an index. The arrays are finite.
        """

    def copied(self, arrays: Arrays) -> Arrays:
        """Return copies of the arrays in the same memory order; `sources` can be left as results.

        Calls that return new arrays scale units in these, in place: any other way takes up to three times as long.
        """

    def leave_each(self, values: Any, dtype: str, leaves: Sequence[Any]) -> list[Any]:
        """Return each entry of a wide vector, or each of several arrays, in the named dtype.

        `leaves` has for each a leaf near which it is placed; for entries, perhaps a list of them.
        """

    def known(self, leaves: Sequence[Any]) -> Any:
        """Return the leaves as the kernels' own arrays; None if one look cannot read all or make results like them."""

    def arrays_of(self, leaves: Sequence[Any], kernels: Any) -> Arrays:
        """Return leaves that `known` has described to the kernels as arrays."""

    def new_like(self, leaves: Sequence[Any], *, copied: bool) -> list[Any]:
        """Return new leaves with the same memory order: copies, or with arbitrary values."""

    def number(self, value: float, dtype: str) -> Any:
        """Return a number as a scalar of the framework."""

    def array(self, values: np.ndarray | np.generic, dtype: str) -> Any:
        """Return numbers as a new array in the named dtype. Unlike by `leave_scalar`, an array of no axes stays one."""

    def wrote(self, leaves: Sequence[Any]) -> None:
        """Tell the framework that gradients were written behind its back."""

    def threads(self) -> int:
        """Return how many threads a call may use."""


def is_concrete(backend: Backend) -> TypeGuard[HostBackend]:
    """Say whether the backend's arrays are in host memory."""
    return backend.concrete
