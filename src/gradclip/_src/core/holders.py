"""The holders of the parts of one gradient, and what clipping must ask them.

Usually one process holds the whole gradient. But processes or devices of a mesh may hold shards, or parts may be read
one after the other. Four things then differ: how to compute the global norm, whether exact arithmetic can compare it
with a threshold, the dtype of the returned norm, and who knows where a NaN is. Each kind of holder is a class that
answers these four questions; for answers it does not define, the usual ones apply.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradclip._src.core import nonfinite, norms
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.layouts import Groups, Scope, Several
from gradclip._src.core.norms import Norm, Order
from gradclip._src.core.protocols import Backend, is_concrete

Check = Callable[[Arrays, float, float], bool]
"""From arrays, an order p and a threshold: whether the global norm is at most the threshold, in exact arithmetic."""


class Held(NamedTuple):
    """Arrays, which may be a part of what others hold too, and which of their elements share a norm."""

    arrays: Arrays
    layout: Several


class Together(Protocol):
    """Holders of which each holds parts of several norms. They measure all norms in one step, in which all take part.

    A layout has the same norms for each of them, in the same order, or those of the parts that only it holds.
    """

    def measure_parts(self, backend: Backend, parts: Sequence[Held], order: Order) -> list[Norm]:
        """Return the norms of several sets of arrays as vectors; the layouts of all sets have the same norms."""
        ...

    def finite(self, backend: Backend) -> Any:
        """Return whether all elements that the last step measured are finite, at every holder."""
        ...

    def at_most_each(
        self, backend: Backend, part: Held, order: Order, max_norms: np.ndarray, unclear: np.ndarray
    ) -> Any:
        """Return which of the `unclear` norms are at most their thresholds, in exact arithmetic. False if unknown."""
        ...


class Holders(Protocol):
    """Those who hold parts of one gradient. This holder has the arrays passed to each method."""

    unseen_dtypes: bool = False
    """Whether another holder may have arrays of dtypes that this one cannot see."""

    sees_all: bool = False
    """Whether the arrays of a call are the whole gradient."""

    together: Together | None = None
    """The same holders, if they measure several norms in one step."""

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the global norm."""
        ...

    def measure_units(self, backend: Backend, arrays: Arrays, order: Order, scope: Scope) -> Norm:
        """Return each norm of a scope. This holder has all elements that share one."""
        return backend.norms(arrays, order, scope)

    def measure_each(self, backend: Backend, arrays: Arrays, order: Order, layout: Groups) -> Norm:
        """Return the norms of several gradients as a vector; each group is the local part of one gradient."""
        groups = [backend.chosen(arrays, group) for group in layout.groups]
        return norms.stacked(backend, [self.measure(backend, group, order) for group in groups])

    def exact_check(self, backend: Backend) -> Check | None:
        """Return a function that checks a norm exactly; None if that is impossible, the same for all holders."""
        return None

    def norm_dtype(self, arrays: Arrays) -> str:
        """Return the dtype of the returned global norm."""
        return norms.norm_dtype(arrays)

    def raise_nonfinite(self, backend: Backend, arrays: Arrays, names: Sequence[str]) -> None:
        """Raise a FloatingPointError that names the arrays with NaN or infinity, and who holds them."""
        nonfinite.raise_nonfinite(backend, arrays, names)


class Alone(Holders):
    """One process that holds the whole gradient."""

    sees_all = True
    norm_dtype = staticmethod(norms.norm_dtype)
    raise_nonfinite = staticmethod(nonfinite.raise_nonfinite)

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm of the arrays."""
        return backend.norms(arrays, order)

    def measure_each(self, backend: Backend, arrays: Arrays, order: Order, layout: Groups) -> Norm:
        """Return the norms of the groups as a vector."""
        return backend.norms(arrays, order, layout)

    def exact_check(self, backend: Backend) -> Check | None:
        """Return a function that checks a norm exactly, if the values can be read."""
        return backend.at_most if is_concrete(backend) else None


ALONE = Alone()


@dataclass(frozen=True)
class Measured(Holders):
    """Holders of arrays whose norms have been measured before: one, or each of a layout."""

    norm: Norm
    unseen_dtypes: bool = True

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm."""
        return self.norm

    def measure_each(self, backend: Backend, arrays: Arrays, order: Order, layout: Groups) -> Norm:
        """Return the norms."""
        return self.norm

    def measure_units(self, backend: Backend, arrays: Arrays, order: Order, scope: Scope) -> Norm:
        """Return the norms."""
        return self.norm
