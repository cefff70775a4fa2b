"""The norms of gradients one by one, which a call that clips them together measures on its way."""

from collections.abc import Callable, Sequence
from operator import call, is_
from typing import Any
from weakref import ref

import numpy as np

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.holders import ALONE
from gradclip._src.core.layouts import Groups
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import measure_all
from gradclip._src.core.protocols import Backend
from gradclip._src.core.values import Array


class Names:
    """The names of gradients, found once for calls that list the same owners of gradients in the same way.

    The owners are not kept alive: a monitor may outlive the model.
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[ref[Any]], object, Sequence[str]] = (), None, ()

    def of(self, owners: Sequence[Any], way: object, names: Callable[[], Sequence[str]]) -> Sequence[str]:
        """Return the names of gradients with these owners, listed in this way."""
        last, before, known = self._last
        if len(owners) == len(last) and way == before and all(map(is_, owners, map(call, last))):
            return known
        found = names()
        try:
            self._last = list(map(ref, owners)), way, found
        except TypeError:  # some owners allow no weak references
            self._last = (), None, ()
        return found


class EachNorm:
    """The names of the gradients and a vector of their norms, as the first measurement finds them, before the clip.

    Both are None if nothing was measured. Norms of an order that takes long to measure are measured only if `asked`.
    """

    def __init__(self, found: Names | None = None, *, asked: bool = True) -> None:
        self._asked = asked
        self.names: Sequence[str] | None = None
        self.norms: Any = None
        self._found = Names() if found is None else found

    def of(self, indices: Sequence[int], stack: Callable[[Sequence[Array]], Array]) -> "EachNorm":
        """Return the names and norms of some of the gradients. A list of indices would wait for a device."""
        chosen = EachNorm()
        if self.names is not None:
            chosen.names = [self.names[index] for index in indices]
            chosen.norms = stack([self.norms[index] for index in indices]) if indices else self.norms[:0]
        return chosen

    def take(
        self,
        sums: Sequence[float],
        order: Order,
        owned: tuple[Sequence[Any], object],
        names: Callable[[], Sequence[str]],
    ) -> None:
        """Take the sums of powers of the gradients, and who owns them, listed in which way. `names` finds names."""
        self.take_norms(np.sqrt(sums) if order.p == 2 else np.array(sums), owned, names)

    def take_norms(self, norms: Array, owned: tuple[Sequence[Any], object], names: Callable[[], Sequence[str]]) -> None:
        """Take the norms of the gradients likewise."""
        if self.names is None:
            self.norms = norms
            self.names = self._found.of(*owned, names) if owned[0] else names()

    def measure(self, backend: Backend, arrays: Arrays, order: Order, names: Callable[[], Sequence[str]]) -> None:
        """Measure arrays, all of which this process holds."""
        if arrays and self.wants(order):
            norm = measure_all(backend, arrays, Groups.each_alone(len(arrays)), order, ALONE)
            self.put(norm.product(), names())

    def wants(self, order: Order) -> bool:
        """Return whether norms of this order are still to be measured."""
        return self.names is None and (self._asked or order.p == 2)

    def put(self, norms: Array, names: Sequence[str]) -> None:
        """Take norms that others have measured."""
        self.norms, self.names = norms, names
