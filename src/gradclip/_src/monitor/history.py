"""The steps that a monitor keeps, and those that it has not fetched yet."""

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from threading import Condition, RLock, get_ident
from typing import Any

from gradclip._src.core.pipeline import EachNorm, Names
from gradclip._src.monitor.pending import FetchedStep, Note, Pending, resolved_each
from gradclip._src.monitor.records import Counts, Handling, Spike, Step
from gradclip._src.monitor.saved import State
from gradclip._src.monitor.spikes import Spikes
from gradclip._src.monitor.wording import tiny
from gradclip._src.words import level_of_caller, shown


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


_OF_A_COPY = ("fetch_every", "layers_every", "_waiting", "_calls", "_warned")


class History:
    """The last steps, oldest first, the counts of all, and the spikes. Values of several steps are fetched together.

    One thread may read, to show a page, while another thread records.
    """

    _warned = False

    def __init__(
        self, capacity: int, fetch_every: int, layers_every: int, spikes: Spikes, tell: Callable[[Step], object] | None
    ) -> None:
        self.fetch_every, self.layers_every, self.tell = fetch_every, layers_every, tell
        self._spikes = spikes
        self._kept: deque[Step] = deque(maxlen=capacity)
        self._counts = Counts()
        self._pending: list[Pending] = []
        self._waiting = self._calls = 0
        self._notes: dict[int, Note] = {}  # by thread
        self.handling: Handling | None = None  # that of the last step
        self._set_apart()

    def _set_apart(self) -> None:
        """Make anew what no copy takes over."""
        self._lock, self._callbacks, self._names = RLock(), Callbacks(), Names()

    def plain(self) -> dict[str, Any]:
        """Return what a copy takes over, fetched or not, in tuples, lists and the records that users know."""
        with self._lock:
            return {
                **{name: getattr(self, name) for name in _OF_A_COPY},
                "_kept": self._kept.copy(),
                "_counts": self._counts,
                "_pending": [one.plain() for one in self._pending],
                "_notes": {thread: note[:3] for thread, note in self._notes.items()},
                "_spikes": self._spikes.plain(),
                "handling": self.handling and tuple(self.handling),
            }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any], tell: Callable[[Step], object] | None) -> "History":
        """Return a copy that goes on by itself."""
        made = cls.__new__(cls)
        vars(made).update(plain)
        made._pending = [Pending.of_plain(*one) for one in plain["_pending"]]
        made._notes = {thread: Note(*said) for thread, said in plain["_notes"].items()}
        made._spikes, made.tell = Spikes.of_plain(plain["_spikes"]), tell
        made.handling = plain["handling"] and Handling(*plain["handling"])
        made._set_apart()
        return made

    @property
    def settings(self) -> dict[str, int]:
        """The settings of a monitor with as much room. It keeps no layers but those of spikes."""
        assert self._kept.maxlen is not None
        return {
            "capacity": self._kept.maxlen,
            "fetch_every": self.fetch_every,
            "keep_spikes": self._spikes.keep,
        }

    @property
    def wants_layers(self) -> bool:
        """Whether the layers of the next call are to be kept with its step."""
        return self.layers_every > 0 and self._calls % self.layers_every == 0

    def watching(self) -> EachNorm | None:
        """Return what takes the norms of the layers in the next call, for its step or in case it is a spike."""
        return EachNorm(self._names, asked=self.wants_layers) if self._spikes.keep or self.wants_layers else None

    def note(self, note: Note) -> None:
        """Take what is said of the next step that this thread adds."""
        with self._lock:
            self._notes[get_ident()] = self._notes.get(get_ident(), Note()).with_more(note)

    def noted(self) -> Note:
        """Return what the caller has said of the next step that this thread adds."""
        with self._lock:
            return self._notes.get(get_ident(), Note())._replace(each=None)

    def add(self, pending: Pending, said: Note) -> None:
        """Add one or several steps, with what is said of them now and before. Fetch if enough steps wait."""
        with self._lock:
            note = self._notes.get(get_ident(), Note()).with_more(said)
            # Calls that raise are no steps, so they never fill what waits. The first of several in a row is enough.
            if not (pending.missed and self._pending and self._pending[-1].missed):
                self._pending.append(pending.noted(note, sampled=self.wants_layers))
            self._notes.pop(get_ident(), None)
            if not pending.missed:
                self.handling = pending.handling  # a call that raised does not tell all of it
                self._calls += 1
                self._waiting += pending.steps
            enough = self._waiting >= self.fetch_every
        if enough:
            self.fetch()

    def fetch(self) -> None:
        """Fetch the values of all steps recorded so far, tell of them, and raise the first error, if any."""
        with self._lock:
            pending, self._pending, self._waiting = self._pending, [], 0
            seen, error = resolved_each(pending, self._kept[-1].step + 1 if self._kept else 1)
            steps = [one.step for one in seen if not one.missed]
            self._counts = self._counts.plus(steps)
            self._kept.extend(steps)
            self._spikes.see(seen)
            if self.tell is not None:
                self._callbacks.add(steps)
        raised = self._callbacks.tell(self.tell) if self.tell is not None else None
        if error := error or raised:
            raise error
        self._warn(steps)

    def _warn(self, steps: Sequence[Step]) -> None:
        """Warn once of a coefficient so small that an optimizer may lose the gradients."""
        small = None if self._warned else next((step for step in steps if step.tiny), None)
        if small is not None:
            self._warned = True
            warnings.warn(tiny(small), UserWarning, stacklevel=level_of_caller())

    def wait(self) -> None:
        """Wait until no other thread tells of steps."""
        self._callbacks.wait()

    def steps(self) -> list[Step]:
        """Return the kept steps, all values fetched."""
        self.fetch()
        with self._lock:
            return list(self._kept)

    def last(self) -> Step | None:
        """Return the last step; None before the first."""
        self.fetch()
        with self._lock:
            return self._kept[-1] if self._kept else None

    def counts(self) -> Counts:
        """Return the counts of all steps."""
        self.fetch()
        return self._counts

    def spikes(self) -> list[Spike]:
        """Return the spikes, in the order of their steps."""
        self.fetch()
        with self._lock:
            return self._spikes.kept()

    def state(self) -> State:
        """Return what to save."""
        self.fetch()
        with self._lock:
            return State(list(self._kept), self._counts, self._calls, self._spikes.kept())

    def replace(self, state: State) -> None:
        """Replace all steps by those of a state."""
        with self._lock:
            self._pending, self._waiting, self._notes = [], 0, {}
            self._kept, self._counts = deque(state.steps, self._kept.maxlen), state.counts
            self._calls = state.calls
            self._spikes.restart([FetchedStep(step, step.layers) for step in state.steps], state.spikes)


def setting(name: str, value: int, least: int = 0) -> int:
    """Return a setting that is a whole number. Raises ValueError if it is none, or is out of range."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= sys.maxsize:
        raise ValueError(f"{name} must be a whole number of at least {least} that fits 64 bits, got {shown(value)}.")
    return int(value)
