"""One look at ordinary arrays, those that the kernels read as they are, settles most of their norms, for any layout.

Those are norms of order 1, 2 or infinity that are finite and clearly on one side of a threshold that is a number. They
are decided to the bit as the pipeline would do it: one norm for all with plain Python numbers, several by the kernels
(`native/settle.cpp`). What one look does not settle goes on to the pipeline.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from gradclip._src.backends import among_several
from gradclip._src.backends.framework import OnDevice
from gradclip._src.backends.host.laid import Settled, kind_of, laid, laid_plainly
from gradclip._src.backends.registry import framework_of
from gradclip._src.backends.sums import kernels_norm_error
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.coefficient import ERROR_OF_KNOWN, KEPT, of_number
from gradclip._src.core.decision import left_norms
from gradclip._src.core.layouts import Rows, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import HostBackend
from gradclip._src.core.units import thresholds_of_vector
from gradclip._src.core.values import shape_of
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_threshold, of_each
from gradclip._src.passed.parameters import owners_of

if TYPE_CHECKING:
    from gradclip._src.backends.framework import Framework
    from gradclip._src.native._kernels import Arrays as KernelArrays

_LARGEST_NORM = 2.0**127  # fits a float32 scalar

NO_LIMIT = np.array([math.inf])


class Look(NamedTuple):
    """Arrays that the kernels can all read, with their backend and the framework's own arrays.

    What one look does not settle, the methods leave as it is, and return None.
    """

    backend: HostBackend
    kernels: "KernelArrays"
    leaves: Sequence[Any]
    once: "KernelArrays | None" = None  # each different array once, if several parameters have the same one

    def arrays(self) -> Arrays:
        """Return the same as the `Arrays` that the pipeline takes."""
        return self.backend.arrays_of(self.leaves, self.kernels)

    def scalar(self, norm: float) -> Any:
        """Return a norm as a scalar of the framework."""
        return self.backend.number(norm, kind_of(tuple(self.kernels.dtypes)).dtype_of_norm)

    def norm(self, order: Order) -> Any:
        """Return the norm of all arrays as a scalar of their framework."""
        found = self.measured(order)
        return None if found is None else self.backend.number(found[0], found[2])

    def clip_(self, max_norm: float, order: Order, each: list[float] | None = None) -> Any:
        """Clip the arrays, which can be written, in place; return their norm as a scalar of their framework.

        If `each` is a list, the sum of the powers of each array is written to it.
        """
        found = self.measured(order, each)
        factors = found and of_number(found[0], found[1], max_norm)
        if found is None or factors is None:
            return None
        if factors is not KEPT:
            written = self.once or self.kernels
            written.scale(written, factors[0], factors[1], self.backend.threads())
            self.backend.wrote(self.leaves)
        return self.backend.number(found[0], found[2])

    def clip_by_known_(self, norm: float, max_norm: float) -> bool:
        """Scale the arrays in place as their norm, which is known up to rounding to float32, asks for."""
        factors = of_number(norm, ERROR_OF_KNOWN, max_norm, as_it_is=True)
        if factors is None or kind_of(tuple(self.kernels.dtypes)).any_complex:
            return False
        if factors is not KEPT:
            written = self.once or self.kernels
            written.scale(written, *factors, self.backend.threads())
            self.backend.wrote(self.leaves)
        return True

    def clamp_(self, bound: float) -> bool:
        """Clamp the elements in place. Complex ones have no order."""
        if kind_of(tuple(self.kernels.dtypes)).any_complex:
            return False
        (self.once or self.kernels).clamp(bound, self.backend.threads())
        self.backend.wrote(self.leaves)
        return True

    def clip_several_(self, layout: Several, max_norms: np.ndarray, order: Order) -> np.ndarray | None:
        """Clip the arrays in place by the norms of a layout; return these. One threshold, or one for each norm."""
        found = self.settled(layout, max_norms, order)
        if found is None:
            return None
        if not found.all_kept:
            found.parts.scale(found.table)
            parts = layout.parts_of(found.table[0] == 0)
            each = (self.leaves[index] for number in parts for index in layout.part(number).indices)
            self.backend.wrote(self.leaves if len(parts) == layout.number else list(each))
        return found.norms

    def clipped_several(
        self, layout: Several, max_norms: np.ndarray, order: Order
    ) -> tuple[list[Any], np.ndarray] | None:
        """Return new arrays, clipped likewise, and the norms."""
        found = self.settled(layout, max_norms, order) if self.kernels.in_order else None
        if found is None:
            return None
        if found.parts.copies and not found.all_kept:
            copies = self.backend.copied(self.arrays())
            found.parts.scale_copies(found.table, copies)
            return self.backend.leave_all(copies.sources, self.leaves), found.norms
        results = self.backend.new_like(self.leaves, copied=found.all_kept)
        if not found.all_kept:
            places = self.backend.known(results)
            if places is None:
                return None
            found.parts.scale(found.table, places)
            if self.backend.immutable:
                self._keep(results, layout, layout.parts_of(found.table[0] == 0))
        return results, found.norms

    def _keep(self, results: list[Any], layout: Several, changed: Sequence[int]) -> None:
        """Put the arrays of parts that did not change themselves among the results."""
        for number in set(range(layout.number)).difference(changed):
            for index in layout.part(number).indices:
                results[index] = self.leaves[index]

    def settled(self, layout: Several, max_norms: np.ndarray, order: Order) -> Settled | None:
        """Return the norms of a layout, and what happens to these arrays."""
        kind, threads = kind_of(tuple(self.kernels.dtypes)), self.backend.threads()
        if order.p not in (1, 2) or kind.any_complex:
            return None
        parts = laid_plainly(self.kernels, layout, kind, threads) or laid(self.arrays(), layout, threads)
        return None if parts is None or parts.beyond else parts.settle(order.p, max_norms)

    def following(self, weights: Sequence[Any], layout: Rows, order: Order, both: tuple[float, float]) -> Any:
        """Return the thresholds of `Adaptive` from the norms of weights of the same shapes; None if not settled."""
        if {*map(framework_of, weights)} != {framework_of(self.leaves[0])}:
            return None  # `prepare` would convert them
        try:
            prepared = list(map(self.backend.prepare, weights))
        except TypeError:
            return None
        kernels = self.backend.known(prepared)
        return kernels and Look(self.backend, kernels, prepared).followed(layout, order, both)

    def followed(self, layout: Rows, order: Order, both: tuple[float, float]) -> np.ndarray | None:
        """Return the thresholds that follow the norms of these arrays, which must have the shapes of the layout."""
        found = self.settled(layout, NO_LIMIT, order) if tuple(map(shape_of, self.leaves)) == layout.shapes else None
        if found is None:
            return None
        errors = found.parts.errors(order.p)
        error = errors[0] if len(set(errors)) == 1 else layout.each(errors)
        return thresholds_of_vector(found.norms, error, *both)

    def left(self, layout: Several, norms: np.ndarray) -> list[Any]:
        """Return the norms of each part as scalars or arrays of the framework."""
        kind = kind_of(tuple(self.kernels.dtypes))
        if kind.one_dtype and (isinstance(layout, Rows) or layout.alone):
            each = layout.shaped(norms) if isinstance(layout, Rows) else norms
            return self.backend.leave_each(each, kind.dtype_of_norm, self.leaves)
        return left_norms(self.backend, layout, Norm(norms, None, 0.0, 0.0), self.arrays(), self.leaves)

    def clipped(self, max_norm: float, order: Order) -> tuple[list[Any], list[Any]] | None:
        """Return new arrays, clipped, and a list of their norm as a scalar of their framework."""
        found = self.measured(order) if self.kernels.in_order else None
        factors = found and of_number(found[0], found[1], max_norm)
        if found is None or factors is None:
            return None
        results = self.backend.new_like(self.leaves, copied=factors is KEPT)
        if factors is not KEPT:
            places = self.backend.known(results)
            if places is None:
                return None
            self.kernels.scale(places, factors[0], factors[1], self.backend.threads())
        return results, [self.backend.number(found[0], found[2])]

    def measured(self, order: Order, each: list[float] | None = None) -> tuple[float, float, str] | None:
        """Return the norm in plain numbers, its error, and the dtype in which it is returned."""
        kernels, threads, error = self.kernels, self.backend.threads(), 0.0
        kind = kind_of(tuple(kernels.dtypes))
        if kind.any_complex or order.p not in (1, 2, math.inf if each is None else 2):
            return None
        if order.extreme:
            value, _, nonfinite = kernels.extremes(threads)
            if nonfinite:
                return None
        else:
            if each is None:
                total, _ = kernels.sum(order.p, 1.0, kind.only_halves, threads)
            else:
                *each[:], total = kernels.sums_of_each(order.p, kind.only_halves, threads)
            if not total > kind.enough:
                return None
            value = math.sqrt(total) if order.p == 2 else total
            error = kernels_norm_error(kernels.count, order.p, kind.only_halves)
        return (value, error, kind.dtype_of_norm) if value < _LARGEST_NORM else None


def read(leaves: Sequence[Any]) -> Look | None:
    """Return the leaves of a tree; None if they are not ordinary or a derivative is requested for them."""
    framework = framework_of(leaves[0]) if leaves else None
    backend = framework.on_fast_path(leaves) if framework else None
    return _described(backend, leaves) if backend and backend.plain(leaves) else None


def read_on_device(leaves: Sequence[Any]) -> OnDevice | None:
    """Return the leaves of a tree for kernels on their device; None if these cannot read all of them."""
    framework = framework_of(leaves[0]) if leaves else None
    return framework.on_device(leaves) if framework else None


def gradients(parameters: object, *, on_host: bool = False) -> Look | OnDevice | None:
    """Return the gradients of parameters, or a tree of arrays that are gradients; with `on_host` only those there.

    Return None if they are not ordinary, if some share memory, or if there may be other processes.
    """
    framework, leaves = _held(parameters)
    if framework is None:
        return None
    backend = framework.on_fast_path(leaves)
    if backend is None:
        return None if on_host else _apart(framework, leaves)
    found = _described(backend, leaves)
    return found if found is None or not found.kernels.overlap() else _of_several_owners(found, parameters)


@with_subnormals
def clip_alone_(parameter: object, max_norm: float, order: Order) -> Any:
    """Clip the gradient of one parameter in place by its own norm; return the norm, or None if it is not settled."""
    framework = None if among_several() else framework_of(parameter)
    leaves = framework.gradients_of([parameter]) if framework else None
    found = _described(framework.on_fast_path(leaves), leaves) if framework and leaves else None
    return found.clip_(max_norm, order) if found and found.kernels.writable else None


def _of_several_owners(found: Look, parameters: object) -> Look | None:
    """Return gradients of which some are one object, each of another parameter; None if others share memory."""
    if isinstance(found.leaves[0], np.ndarray):
        return None  # an array that a tree has twice counts once
    if len(set(map(id, listed := owners_of(parameters)))) < len(listed):
        return None
    each = list({id(leaf): leaf for leaf in found.leaves}.values())
    once = found.backend.known(each) if len(each) < len(found.leaves) else None
    return None if once is None or once.overlap() else found._replace(once=once)


def _held(parameters: object) -> tuple["Framework | None", Sequence[Any]]:
    """Return the gradients of parameters with their framework; None in its place if they are not ordinary."""
    listed, in_tree = [parameters], False
    if isinstance(parameters, list | tuple):
        kinds = set(map(type, parameters))
        listed = list(owners_of(parameters) if kinds in ({tuple}, {dict}) else parameters)
        in_tree = type(parameters) in (list, tuple) and kinds == {np.ndarray}
    elif type(parameters) is dict:
        listed = list(parameters.values())
        if listed and not hasattr(listed[0], "grad"):
            leaves = optree.tree_leaves(parameters)
            in_tree = set(map(type, leaves)) == {np.ndarray}
            listed = leaves if in_tree else listed
    framework = framework_of(listed[0]) if listed else None
    if framework is None or among_several() or (not in_tree and isinstance(listed[0], np.ndarray)):
        return None, ()
    leaves = listed if in_tree else framework.gradients_of(listed)
    return (framework, leaves) if leaves else (None, ())


def _apart(framework: "Framework", leaves: Sequence[Any]) -> OnDevice | None:
    """Return leaves for kernels on their device; None if some share memory, or one, which may be empty, is repeated."""
    given = framework.on_device(leaves)
    return given if given is not None and given.apart() and len(set(map(id, leaves))) == len(leaves) else None


def to_write(parameters: object) -> Look | None:
    """Return the same if they are in host memory and can be written in place; else None."""
    found = gradients(parameters, on_host=True)
    return found if isinstance(found, Look) and found.kernels.writable else None


def to_clip(parameters: object, max_norm: object) -> tuple[Look | OnDevice, Any] | None:
    """Return the same if they can be written in place, with the threshold if it is known; else None.

    On a device, the threshold may also be a scalar there.
    """
    found = gradients(parameters)
    if found is None or (isinstance(found, Look) and not found.kernels.writable):
        return None
    threshold = known_threshold(max_norm)
    if threshold is None and not isinstance(found, Look):
        threshold = found.threshold(max_norm)
    return None if threshold is None else (found, threshold)


def _described(backend: HostBackend | None, leaves: Sequence[Any]) -> Look | None:
    kernels = backend.known(leaves) if backend else None
    return Look(backend, kernels, leaves) if backend and kernels else None


def known_threshold(max_norm: object) -> float | None:
    """Return a threshold that is a number, or a scalar array in host memory without a derivative; else None.

    None also for what is no threshold: `check_threshold` raises the error, after those that come before it.
    """
    if type(max_norm) is float or (type(max_norm) is int and max_norm <= 2**53):
        return max_norm if max_norm >= 0 else None
    framework = framework_of(max_norm) if getattr(max_norm, "shape", None) == () else None
    backend = framework.on_fast_path([max_norm]) if framework else None
    if backend is None or not backend.plain([max_norm]):
        return None
    try:
        return check_threshold(max_norm, backend=backend)
    except (TypeError, ValueError):
        return None


def known_thresholds(max_norms: Sequence[object]) -> list[float] | None:
    """Return the same for each of several thresholds; None if one of them is None."""
    found = of_each(known_threshold, max_norms)
    return None if None in found else found
