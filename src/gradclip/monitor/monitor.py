"""`Monitor` records what clipping does at every step, and reports it when you ask."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from gradclip.monitor.advice import Advice, advise
from gradclip.monitor.pending import Callbacks, Pending, named, resolved_each
from gradclip.monitor.records import Columns, Counts, LayerTable, Overview, Step
from gradclip.monitor.saved import State, from_lines, to_line
from gradclip.typing import Policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Callback = Callable[[int, dict[str, float]], object]
_CAPACITY = 10_000  # steps


class Monitor:
    """Record what clipping does at each step: the norm before clipping, the threshold, and whether it clipped.

    Pass it as `monitor=` to `gradclip.clip_grad_norm_`, or call `record` with the result of a clipping call. A step
    does not wait for the device: values are fetched together when you read something, or every `fetch_every` steps.

    Args:
        capacity: the number of steps to keep, by default 10,000; the oldest are dropped first. The counts cover all
            steps.
        fetch_every: fetch values after this many steps. 1 fetches at every step, which waits for an accelerator.
        layers_every: with `clip_grad_norm_`, also record the norm of each gradient, at the first step and then once
            every `layers_every` steps; 0 never. With other calls, pass the layer norms to `record`.
        top: how many of the layers with the largest norms `callback` and `top_layers` name.
        callback: called as `callback(step, numbers)` for each step in order, once its values are fetched. `numbers` is
            a dict of plain floats, ready for a logger: "norm", "max_norm", "coefficient", "clipped", "skipped" and
            "nonfinite" (flags are 0.0 or 1.0), and "layers/NAME" for each of the `top` layers. If several threads
            record or read, one of them at a time calls it.

    Raises:
        ValueError: a `capacity` or `fetch_every` below 1, a negative `layers_every` or `top`. TypeError: a `callback`
        that cannot be called.

    A step counts as clipped if the norm that the call returned is finite and above the threshold, and the step was not
    skipped. With `nonfinite="zero"`, that norm covers the finite elements only.

    >>> import gradclip
    >>> import numpy as np
    >>> monitor = Monitor()
    >>> for gradient in ([3.0, 4.0], [0.3, 0.4]):
    ...     norm = gradclip.clip_grad_norm_({"w": np.array(gradient)}, 1.0, monitor=monitor)
    >>> monitor.steps, monitor.clipped, [(step.norm, step.coefficient) for step in monitor.records]
    (2, 1, [(5.0, 0.2), (0.5, 1.0)])

    """

    def __init__(
        self,
        capacity: int = _CAPACITY,
        *,
        fetch_every: int = 100,
        layers_every: int = 0,
        top: int = 5,
        callback: Callback | None = None,
    ) -> None:
        if not (callback is None or callable(callback)):
            raise TypeError(f"callback must be a function of a step and a dict, got {callback!r:.80}.")
        self.fetch_every, self.layers_every = (
            _whole("fetch_every", fetch_every, 1),
            _whole("layers_every", layers_every),
        )
        self.top, self.callback = _whole("top", top), callback
        self._kept: deque[Step] = deque(maxlen=_whole("capacity", capacity, 1))
        self._counts = Counts()
        self._pending: list[Pending] = []
        self._waiting = self._calls = 0
        self._lock = RLock()  # one thread may read, to show a page, while another thread records
        self._callbacks = Callbacks()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            held = {name: value for name, value in vars(self).items() if name not in ("_lock", "_callbacks")}
            return held | {"_kept": self._kept.copy(), "_pending": list(self._pending)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=RLock(), _callbacks=Callbacks())

    def __repr__(self) -> str:
        steps, clipped, skipped, nonfinite = self.counts
        return f"Monitor({steps} steps, {clipped} clipped, {skipped} skipped, {nonfinite} not finite)"

    def record(
        self,
        norm: object,
        max_norm: object,
        layer_norms: object = None,
        *,
        nonfinite: Policy = "propagate",
        names: Sequence[str] | None = None,
        skip_above: float = math.inf,
    ) -> None:
        """Record one or several steps. Later changes to the arrays do not affect the record.

        Args:
            norm: the norm before clipping, as the clipping call returned it: a number or a scalar array of any
                framework. A vector stands for several steps in a row, such as `jax.lax.scan` returns.
            max_norm: the threshold of the step, or one for each step. Or a `gradclip.AdaptiveNorm` after its call.
            layer_norms: a tree of the layers' norms, as `gradclip.layer_norms` and `gradclip.clip_by_layer_norm` return
                it. With `names`, a vector of the layers' norms at one step.
            nonfinite: the policy of the clipping call. With "skip", non-finite steps count as skipped.
            names: the names of the layers in that vector.
            skip_above: the `skip_above` of the clipping call, so that steps it skipped count as skipped. Not needed
                with a `gradclip.AdaptiveNorm`.

        Raises:
            TypeError: a value that is not a number or an array of real numbers, a traced array. ValueError: shapes that
            do not match, a `skip_above` below 1.

        """
        pending = Pending.of(norm, max_norm, layer_norms, nonfinite, named(names), skip_above)
        with self._lock:
            self._pending.append(pending)
            self._calls += 1
            self._waiting += pending.steps
            enough = self._waiting >= self.fetch_every
        if enough:
            self._fetch()

    @property
    def wants_layers(self) -> bool:
        """Whether the next step should record layer norms."""
        return self.layers_every > 0 and self._calls % self.layers_every == 0

    def fetch(self) -> None:
        """Fetch the values of all steps recorded so far. Reading anything does this for you.

        Steps that cannot be fetched are left out, and `callback` is called for all others. Then the first error is
        raised. If another thread is calling `callback`, it goes on with these steps, and this call waits for it.
        """
        self._fetch()
        self._callbacks.wait()

    def _fetch(self) -> None:
        with self._lock:
            pending, self._pending, self._waiting = self._pending, [], 0
            steps, error = resolved_each(pending, self._kept[-1].step + 1 if self._kept else 1)
            self._counts = self._counts.plus(steps)
            self._kept.extend(steps)
            if self.callback is not None:
                self._callbacks.add(steps)
        raised = self._callbacks.tell(self._tell)
        if error := error or raised:
            raise error

    def _tell(self, step: Step) -> None:
        if self.callback is not None:
            self.callback(step.step, step.numbers(self.top))

    @property
    def records(self) -> list[Step]:
        """The kept steps, oldest first."""
        self._fetch()
        with self._lock:
            return list(self._kept)

    @property
    def last(self) -> Step | None:
        """The last step; None before the first step."""
        self._fetch()
        with self._lock:
            return self._kept[-1] if self._kept else None

    @property
    def columns(self) -> Columns:
        """The kept steps as arrays: steps, norms, max_norms, clipped, skipped."""
        return Columns.of(self.records)

    @property
    def layers(self) -> LayerTable | None:
        """The layer norms at the steps that recorded them, an array (steps, layers) with names; None without any."""
        return LayerTable.of(self.records)

    @property
    def top_layers(self) -> dict[str, float]:
        """The layers with the largest median norms, largest first; empty if none were recorded."""
        return self._overview().top_layers

    @property
    def counts(self) -> Counts:
        """The numbers of all steps, of clipped, skipped and non-finite steps, and the share clipped."""
        self._fetch()
        return self._counts

    @property
    def steps(self) -> int:
        """The number of steps recorded, including those that are no longer kept."""
        return self.counts.steps

    @property
    def clipped(self) -> int:
        """The number of steps that were clipped."""
        return self.counts.clipped

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped."""
        return self.counts.skipped

    @property
    def nonfinite(self) -> int:
        """The number of steps with a non-finite norm."""
        return self.counts.nonfinite

    def _overview(self) -> Overview:
        return Overview.of(self.records, self.counts, self.top)

    def advise(self) -> Advice:
        """Propose a threshold from the kept steps. Print the result for the proposal, its reasons and alternatives."""
        return advise(self.columns)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the kept steps with matplotlib and return the figure. With a path, also save it there.

        Raises ModuleNotFoundError if matplotlib is not installed.
        """
        from gradclip.monitor.picture import draw

        figure = draw(self._overview())
        if path is not None:
            figure.savefig(path)
        return figure

    def report(self, path: str | Path, title: str = "What gradient clipping did") -> Path:
        """Write a self-contained HTML page with pictures and numbers, and return its path.

        Raises ModuleNotFoundError if matplotlib is not installed.
        """
        from gradclip.monitor.page import page

        written = Path(path)
        written.write_text(page(self._overview(), title), encoding="utf-8")
        return written

    def save(self, path: str | Path) -> None:
        """Write the kept steps as lines of JSON, one per step."""
        text = "".join(to_line(step) + "\n" for step in self.records)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, capacity: int | None = None) -> Monitor:
        """Return a monitor with the steps that `save` wrote: all, or the last `capacity`.

        Without `capacity`, its capacity is the number of steps in the file, but at least 10,000. Its counts cover the
        steps in the file. Raises ValueError for a line that is not a step.
        """
        with Path(path).open(encoding="utf-8", errors="backslashreplace") as file:
            steps = list(from_lines(file))
        monitor = cls(max(_CAPACITY, len(steps)) if capacity is None else capacity)
        monitor._take(steps, Counts().plus(steps))
        return monitor

    def state_dict(self) -> dict[str, Any]:
        """Return the kept steps and the counts as lists and numbers, for any checkpoint format."""
        self._fetch()
        with self._lock:
            return State(list(self._kept), self._counts, self._calls).plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`. It replaces the steps and counts; capacity and settings do not change.

        Raises ValueError if it is not a state of a `Monitor`, and says what is wrong; the monitor then stays unchanged.
        """
        read = State.of(state)
        with self._lock:
            self._pending, self._waiting, self._calls = [], 0, read.calls
            self._take(read.steps, read.counts)

    def _take(self, steps: Sequence[Step], counts: Counts) -> None:
        self._kept, self._counts = deque(steps, self._kept.maxlen), counts


def _whole(name: str, value: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= sys.maxsize:
        raise ValueError(f"{name} must be a whole number of at least {least} that fits 64 bits, got {value!r:.80}.")
    return int(value)
