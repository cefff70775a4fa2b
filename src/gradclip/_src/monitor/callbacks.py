"""Steps that a callback is still to be told of."""

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, get_ident

from gradclip._src.monitor.records import Step


class Callbacks:
    """Steps that a callback is still to be told of. One thread at a time tells them, in their order.

    If another thread adds steps meanwhile, the first goes on with them. So a callback may read the monitor, and may
    wait for other threads that read it.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._teller: int | None = None
        self._idle = Condition()

    def add(self, steps: Iterable[Step]) -> None:
        """Add steps. Calls of this method must be in the order of the steps."""
        self._steps.extend(steps)

    def tell(self, callback: Callable[[Step], object]) -> Exception | None:
        """Call the callback for all steps, unless some thread is doing so; return its first error."""
        with self._idle:
            if self._teller is not None:
                return None
            self._teller = get_ident()
        error: Exception | None = None
        try:
            while (step := self._next()) is not None:
                try:
                    callback(step)
                except Exception as raised:
                    error = error or raised
        finally:
            self._stop()
        return error

    def wait(self) -> None:
        """Wait until no other thread tells steps."""
        with self._idle:
            self._idle.wait_for(lambda: self._teller in (None, get_ident()))

    def _next(self) -> Step | None:
        with self._idle:
            if not self._steps:
                self._teller = None  # together with the look: what is added from now on is told by who adds it
                return None
            return self._steps.popleft()

    def _stop(self) -> None:
        with self._idle:
            if self._teller == get_ident():
                self._teller = None
            self._idle.notify_all()
