"""The monitor of clipping: it is fed at every step, and tells what happened when it is asked."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip.monitor import lines
from gradclip.monitor.advice import Advice, advise
from gradclip.monitor.pending import Pending, resolved_each
from gradclip.monitor.records import Columns, Counts, Layers, LayerTable, Step, narrowed
from gradclip.typing import Policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Callback = Callable[[int, dict[str, float]], object]
_CAPACITY = 10_000  # steps


class Monitor:
    """What clipping did at each step: the norm before clipping, the threshold, whether it fired.

    Pass it as `monitor=` of `gradclip.clip_grad_norm_`, or call `record` with what a clipping call returned. Nothing
    waits for an accelerator at a step: values are fetched together when something is read, or every `fetch_every`
    steps.

    Args:
        capacity: how many steps are kept; the oldest go first. The counts are of all steps.
        fetch_every: after so many steps values are fetched. 1 fetches at once, and waits for an accelerator.
        layers_every: `clip_grad_norm_` records the norm of each gradient, too, at the first step and then every so
            many; 0 never. Other calls pass them to `record`.
        top: how many layers, those with the largest norms, `callback` and `top_layers` name.
        callback: called as `callback(step, numbers)` for each step once its values are fetched, in order; `numbers`
            is a dict of plain floats, as loggers take them.

    Raises:
        ValueError: a `capacity` or `fetch_every` below 1, a negative `layers_every` or `top`.

    A step counts as clipped where the norm that the call returned is finite and above the threshold. Under
    `nonfinite="zero"` that norm is of the finite elements.

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
        for name, value, least in (
            ("capacity", capacity, 1),
            ("fetch_every", fetch_every, 1),
            ("layers_every", layers_every, 0),
            ("top", top, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        self.fetch_every, self.layers_every, self.top, self.callback = fetch_every, layers_every, top, callback
        self._kept: deque[Step] = deque(maxlen=capacity)
        self._counts = Counts()
        self._pending: list[Pending] = []
        self._calls = 0
        self._lock = RLock()  # a thread may read, to show a page, while another records

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

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
        """Record a step, or several, as the values are now: the norm and the threshold may be changed afterwards.

        Args:
            norm: the norm before clipping, as the clipping call returned it: a number or a scalar array of any
                framework. A vector is so many steps in a row, as `jax.lax.scan` returns them.
            max_norm: the threshold of that step, or of each; or a `gradclip.AdaptiveNorm` after its call.
            layer_norms: a tree of the layers' norms, as `gradclip.layer_norms` and `gradclip.clip_by_layer_norm` return
                it; with `names`, a vector of one step's.
            nonfinite: the policy of the clipping call. Under "skip" steps that are not finite count as skipped.
            names: the names of the layers in the vector.
            skip_above: that of the clipping call, so that the steps it skips count as skipped. A
                `gradclip.AdaptiveNorm` tells its own.

        Raises:
            TypeError: what is no number or array, a traced array. ValueError: shapes that do not fit.

        """
        known = None if names is None else tuple(names)
        pending = Pending.of(norm, max_norm, layer_norms, nonfinite, known, skip_above)
        with self._lock:
            self._pending.append(pending)
            self._calls += 1
            enough = len(self._pending) >= self.fetch_every
        if enough:
            self.fetch()

    @property
    def wants_layers(self) -> bool:
        """Whether norms of layers are asked for at the next step."""
        return self.layers_every > 0 and self._calls % self.layers_every == 0

    def fetch(self) -> None:
        """Fetch the values of all steps recorded so far. Reading anything does so.

        What cannot be fetched is left out, and `callback` is called for every other step; then an error is raised.
        """
        with self._lock:
            pending, self._pending = self._pending, []
            steps, error = resolved_each(pending, self._kept[-1].step + 1 if self._kept else 1)
            self._counts = self._counts.plus(steps)
            self._kept.extend(steps)
        if (callback := self.callback) is not None:
            for step in steps:
                try:
                    callback(step.step, step.numbers(self.top))
                except Exception as raised:
                    error = error or raised
        if error is not None:
            raise error

    @property
    def records(self) -> list[Step]:
        """The steps that are kept, the oldest first."""
        self.fetch()
        with self._lock:
            return list(self._kept)

    @property
    def last(self) -> Step | None:
        """The last step; None before the first."""
        self.fetch()
        return self._kept[-1] if self._kept else None

    @property
    def columns(self) -> Columns:
        """The steps that are kept, as arrays: steps, norms, max_norms, clipped, skipped."""
        return Columns.of(self.records)

    @property
    def layers(self) -> LayerTable | None:
        """The norms of layers at the steps that recorded them, as an array (steps, layers), with names; or None."""
        return LayerTable.of(self.records)

    @property
    def top_layers(self) -> dict[str, float]:
        """The layers with the largest median norms, the largest first; empty where none were recorded."""
        table = self.layers
        found = table and table.top(self.top)
        return dict(zip(found.names, found.medians().tolist(), strict=True)) if found else {}

    @property
    def counts(self) -> Counts:
        """How many steps there were since the first, clipped, skipped and not finite; and the share clipped."""
        self.fetch()
        return self._counts

    @property
    def steps(self) -> int:
        """How many steps were recorded, those that are no longer kept among them."""
        return self.counts.steps

    @property
    def clipped(self) -> int:
        """How many of them were clipped."""
        return self.counts.clipped

    @property
    def skipped(self) -> int:
        """How many of them were skipped."""
        return self.counts.skipped

    @property
    def nonfinite(self) -> int:
        """How many of them had a norm that is not finite."""
        return self.counts.nonfinite

    def advise(self) -> Advice:
        """Propose a threshold for gradients like those of the steps that are kept, with reasons."""
        return advise(self.columns)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the steps that are kept with matplotlib, and save the picture where a path is given.

        Raises ModuleNotFoundError that says what to install where matplotlib is missing.
        """
        from gradclip.monitor.picture import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def report(self, path: str | Path, title: str = "What gradient clipping did") -> Path:
        """Write one HTML page with pictures and numbers, which needs neither network nor other files; return its path.

        Raises ModuleNotFoundError as `plot` does.
        """
        from gradclip.monitor.page import page

        written = Path(path)
        written.write_text(page(self, title), encoding="utf-8")
        return written

    def save(self, path: str | Path) -> None:
        """Write the steps that are kept as lines of JSON, one for each."""
        text = "".join(lines.to_line(step) + "\n" for step in self.records)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, capacity: int | None = None) -> Monitor:
        """Return a monitor with the steps that `save` wrote, all of them or the last `capacity`.

        Without `capacity` it keeps as many, but at least 10,000. Its counts are of the steps in the file. Raises
        ValueError for a line that is no step.
        """
        with Path(path).open(encoding="utf-8") as file:
            steps = list(lines.from_lines(file))
        monitor = cls(max(_CAPACITY, len(steps)) if capacity is None else capacity)
        monitor._take(steps, Counts().plus(steps))
        return monitor

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that are kept, and the counts, as lists and numbers, which any checkpoint takes."""
        steps = self.records
        names = list(dict.fromkeys(step.layers.names for step in steps if step.layers))
        places = {one: place for place, one in enumerate(names)}
        return {
            "counts": list(self._counts),
            "calls": self._calls,
            "step": [step.step for step in steps],
            "norm": [step.norm for step in steps],
            "max_norm": [step.max_norm for step in steps],
            "skipped": [step.skipped for step in steps],
            "names": [list(one) for one in names],
            "layers": [[places[s.layers.names], *s.layers.norms.tolist()] if s.layers else [] for s in steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the place of the monitor whose `state_dict` this is; capacity and settings stay as they are.

        Raises ValueError for a dict that is no such state. The monitor is then as it was.
        """
        keys = ("step", "norm", "max_norm", "skipped", "layers")
        try:
            names = [tuple(one) for one in state["names"]]
            rows = zip(*(state[key] for key in keys), strict=True)
            steps = [
                Step(int(step), float(norm), float(max_norm), bool(skipped), _layers(names, layers))
                for step, norm, max_norm, skipped, layers in rows
            ]
            counts, calls = Counts(*map(int, state["counts"])), int(state["calls"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError("this is no state of a Monitor. Pass what state_dict() returned.") from error
        with self._lock:
            self._pending, self._calls = [], calls
            self._take(steps, counts)

    def _take(self, steps: Sequence[Step], counts: Counts) -> None:
        self._kept, self._counts = deque(steps, self._kept.maxlen), counts


def _layers(names: Sequence[tuple[str, ...]], row: Sequence[Any]) -> Layers | None:
    found = Layers(names[int(row[0])], narrowed(np.array(row[1:], np.float64))) if len(row) else None
    if found and len(found.names) != len(found.norms):
        raise ValueError("names and norms of layers must be as many")
    return found
