"""The norm of each gradient, for a monitor of any process, in a call that clips by the norm of all gradients."""

from collections.abc import Callable
from typing import Any

from gradclip._src.core.arrays import Arrays
from gradclip._src.core.each_norm import EachNorm
from gradclip._src.core.holders import Held, Together
from gradclip._src.core.layouts import Groups
from gradclip._src.core.norms import Order
from gradclip._src.core.protocols import Backend
from gradclip._src.distributed.lacking import filled
from gradclip._src.passed.parameters import ParameterList


class Watching:
    """What takes the norm of each gradient on this process, if anything.

    The norms need one more reduction, in which all processes take part as soon as one of them asks for the norms: a
    monitor may be on one process only. They are measured once, before the gradients are scaled. `nothing` is as in
    `lacking.filled`.
    """

    def __init__(self, params: ParameterList, each: EachNorm | None, nothing: Callable[[Any], Any]) -> None:
        self._params, self._each, self._nothing = params, each, nothing
        self._asks = True

    def asking(self, order: Order) -> float:
        """Return 1 if this process asks for the norms, else 0."""
        return float(self._asks and self._each is not None and self._each.wants(order))

    def measure(self, backend: Backend, arrays: Arrays, order: Order, together: Together) -> None:
        """Measure the norms together with the other processes. `arrays` are the gradients of this process."""
        self._asks = False
        params = self._params
        first = {id(p): number for number, p in reversed(list(enumerate(params.parameters)))}
        numbers = sorted(first.values())
        lacking = [params.gradients[number] is None for number in numbers]
        if any(lacking):
            own, every = iter(arrays.sources), filled(params, self._nothing).gradients
            each = zip(numbers, lacking, strict=True)
            arrays = backend.enter([every[number] if lacks else next(own) for number, lacks in each])
        (norm,) = together.measure_parts(backend, [Held(arrays, Groups.each_alone(len(numbers)))], order)
        if self._each is not None:
            values = norm.product()
            # A gradient that no process has is no layer.
            some = [i for i, lacks in enumerate(lacking) if not lacks or values[i] != 0]
            self._each.put(values[some], [params.name(numbers[i]) for i in some])
