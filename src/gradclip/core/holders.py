"""Who holds the parts of one gradient, and what clipping has to ask of them.

Usually one process holds all of it. But processes or devices of a mesh may hold shards, and parts may be read one
after the other. Four things differ then: how the norm of the whole is found, whether exact arithmetic can compare it
with a threshold, the dtype it is handed out in, and who knows where a NaN is. Each kind of holder is a class that
answers these four questions; where it says nothing, the usual answer holds.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.protocols import in_host_memory
from gradclip.core import exact, nonfinite, norms
from gradclip.core.norms import Norm, Order

Check = Callable[[Arrays, float, float], bool]
"""Says of arrays, an order p and a threshold whether the norm of the whole is at most that, in exact arithmetic."""


class Holders(Protocol):
    """Those who hold parts of one gradient, of which this one has the arrays that each method is given."""

    unseen_dtypes: bool = False
    """Whether another holder may have arrays of dtypes that this one cannot see."""

    sees_all: bool = False
    """Whether the arrays of a call are the whole gradient."""

    def measure(self, backend: Backend, arrays: Arrays, order: Order) -> Norm:
        """Return the norm of the whole."""
        ...

    def measure_each(self, backend: Backend, groups: Sequence[Arrays], order: Order) -> Norm:
        """Return the norms of several gradients as a vector, where each group is what is here of one of them."""
        return norms.stacked(backend, [self.measure(backend, group, order) for group in groups])

    def exact_check(self, backend: Backend) -> Check | None:
        """Return what checks a norm exactly; None where that cannot be done, the same for all holders."""
        return None

    def norm_dtype(self, arrays: Arrays) -> str:
        """Return the dtype in which the norm of the whole is handed out."""
        return norms.norm_dtype(arrays)

    def raise_nonfinite(self, backend: Backend, arrays: Arrays, names: Sequence[str]) -> None:
        """Raise a FloatingPointError that names what holds NaN or infinities, and who has it."""
        nonfinite.raise_nonfinite(backend, arrays, names)


class Alone(Holders):
    """One process, which holds all."""

    sees_all = True
    measure = staticmethod(norms.measure)
    measure_each = staticmethod(norms.measure_each)
    norm_dtype = staticmethod(norms.norm_dtype)
    raise_nonfinite = staticmethod(nonfinite.raise_nonfinite)

    def exact_check(self, backend: Backend) -> Check | None:
        """Return what checks a norm exactly, where the values can be seen."""
        return partial(exact.at_most, backend) if in_host_memory(backend) else None


ALONE = Alone()
