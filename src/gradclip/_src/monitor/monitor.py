"""`Monitor` records what clipping does at every step, and reports it when you ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradclip._src.annotations import Policy, StepPolicy
from gradclip._src.core.pipeline import EachNorm
from gradclip._src.monitor.advice import Advice, advise
from gradclip._src.monitor.history import History, setting
from gradclip._src.monitor.pending import Note, Pending, named, norm_and_threshold
from gradclip._src.monitor.records import Columns, Counts, LayerTable, Overview, Spike, Step
from gradclip._src.monitor.saved import State, from_lines, groups_of, to_line
from gradclip._src.monitor.spikes import Spikes
from gradclip._src.public import public
from gradclip._src.words import shown, with_advice

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any

Callback = Callable[[int, dict[str, float]], object]
_CAPACITY = 10_000  # steps


@public
class Monitor:
    """Record what clipping does at each step: the norm before clipping, the threshold, and whether it clipped.

    Pass it as `monitor=` to `gradclip.clip_grad_norm_`, or call `record` with the result of a clipping call. A step
    does not wait for the device: values are fetched together when you read something, or every `fetch_every` steps.

    Args:
        capacity: the number of steps to keep, by default 10,000; the oldest are dropped first. The counts cover all
            steps.
        fetch_every: fetch values after this many steps. 1 fetches at every step, which waits for an accelerator.
        layers_every: with calls that take `monitor=`, also record the norm of each gradient, at the first step and then
            once every `layers_every` steps; 0 never. With other calls, pass the layer norms to `record`.
        keep_spikes: how many spikes to keep: so many with a finite norm, the largest for their level, and so many that
            are not finite, the last, but only the first of several in a row. 0 keeps none, and measures no layers for
            them.
        top: how many of the layers with the largest norms `callback` and `top_layers` name.
        callback: called as `callback(step, numbers)` for each step in order, once its values are fetched. `numbers` is
            a dict of plain floats: "norm", "max_norm", "coefficient", "clipped", "skipped" and "nonfinite" (flags are
            0.0 or 1.0), and "layers/NAME" for each of the `top` layers. Of several threads, one at a time calls it.

    Raises:
        ValueError: a `capacity` or `fetch_every` below 1, a negative `layers_every`, `keep_spikes` or `top`.
        TypeError: a `callback` that cannot be called.

    If parameter groups or patterns of names have thresholds of their own, each of them has a monitor in `groups`, and
    `callback` is also called for it, with names such as "groups/NAME/norm". The step is what the other groups have in
    common; without any, the last group. Its layers are those of all groups. NaN and infinity in one count for all.

    A step counts as clipped if the norm that the call returned is finite and above the threshold, and the step was not
    skipped. With `nonfinite="zero"`, that norm covers the finite elements only.

    >>> import gradclip
    >>> import numpy as np
    >>> monitor = Monitor()
    >>> for grads in np.array([[3.0, 4.0], [0.3, 0.4]]):
    ...     norm = gradclip.clip_grad_norm_(grads, 1.0, monitor=monitor)
    >>> monitor.num_clipped, [(x.norm, x.coefficient) for x in monitor.records]
    (1, [(5.0, 0.2), (0.5, 1.0)])

    """

    @with_advice
    def __init__(
        self,
        capacity: int = _CAPACITY,
        *,
        fetch_every: int = 100,
        layers_every: int = 0,
        keep_spikes: int = 5,
        top: int = 5,
        callback: Callback | None = None,
    ) -> None:
        if not (callback is None or callable(callback)):
            raise TypeError(f"callback must be a function of a step and a dict, got {shown(callback)}.")
        self.top, self.callback = setting("top", top), callback
        self._groups: dict[str, Monitor] = {}
        self._history = History(
            setting("capacity", capacity, 1),
            setting("fetch_every", fetch_every, 1),
            setting("layers_every", layers_every),
            Spikes(setting("keep_spikes", keep_spikes)),
            None if callback is None else self._tell,
        )

    def __repr__(self) -> str:
        steps, clipped, skipped, nonfinite = self.counts
        return f"Monitor({steps} steps, {clipped} clipped, {skipped} skipped, {nonfinite} not finite)"

    def __getstate__(self) -> dict[str, Any]:
        names = ("top", "callback", "_groups")
        return {name: getattr(self, name) for name in names} | {"_history": self._history.plain()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._history = History.of_plain(state["_history"], None if self.callback is None else self._tell)

    @property
    def counts(self) -> Counts:
        """The numbers of all steps, of clipped, skipped and non-finite steps, and the share clipped."""
        return self._history.counts()

    @property
    def steps(self) -> int:
        """The number of steps recorded, including those that are no longer kept."""
        return self.counts.steps

    @property
    def num_clipped(self) -> int:
        """The number of steps that were clipped."""
        return self.counts.num_clipped

    @property
    def num_skipped(self) -> int:
        """The number of steps that were skipped."""
        return self.counts.num_skipped

    @property
    def num_nonfinite(self) -> int:
        """The number of steps with a non-finite norm."""
        return self.counts.num_nonfinite

    def record(
        self,
        norm: object,
        max_norm: object = None,
        *,
        layer_norms: object = None,
        nonfinite: Policy | StepPolicy = "propagate",
        names: Sequence[str] | None = None,
        skip_above: float = math.inf,
        loss: object = None,
        context: object = None,
    ) -> None:
        """Record one or several steps. Later changes to the arrays do not affect the record.

        Args:
            norm: the norm before clipping, as the clipping call returned it: a number or a scalar array of any
                framework. A vector stands for several steps in a row, such as `jax.lax.scan` returns. Or what has a
                `norm` and a `max_norm`, alone: a `gradclip.AdaptiveThreshold`, a handle, a state of optax.
            max_norm: the threshold of the step, or one for each step. Or a `gradclip.AdaptiveThreshold` after its call.
            layer_norms: a tree of the layers' norms, as `gradclip.layer_norms` and `gradclip.clip_by_layer_norm` return
                it. With `names`, a vector of the layers' norms at one step.
            nonfinite: the policy of the call or step. With "skip" or "drop", non-finite steps count as skipped.
            names: the names of the layers in that vector.
            skip_above: the `skip_above` of the clipping call, so that steps it skipped count as skipped. Not needed
                with a `gradclip.AdaptiveThreshold`.
            loss: the loss of the step, a number or a scalar array; for several steps, a vector with an entry for each.
            context: whatever tells the step's batch from others, such as its number or the indices of its examples; for
                several steps, a list or an array with one entry per step. It is not copied.

        Raises:
            TypeError: a value that is not a number or an array of real numbers, a traced array. ValueError: shapes that
            do not match, a `skip_above` below 1.

        """
        if max_norm is None:
            norm, max_norm = norm_and_threshold(norm)
        pending = Pending.of(norm, max_norm, layer_norms, nonfinite, named(names), skip_above)
        self._history.add(pending, Note.of(loss, context))

    @with_advice
    def note(self, *, loss: object = None, context: object = None, step: int | None = None) -> None:
        """Describe the next step that is recorded, in a loop that passes `monitor=` to a clipping call.

        Call it before clipping. A later call before the same step replaces what it passes. `record` prefers what is
        passed to it.

        Args:
            loss: the loss of the step: a number or a scalar array, which may be on a device.
            context: whatever tells the step's batch from others, such as its number or the indices of its examples. It
                is not copied.
            step: the number of the step, such as a trainer's after a resume. Numbers rise, so one that is not above the
                last step's has no effect.

        Raises:
            TypeError: a `loss` that is not a real number or a scalar array of one, or is traced. ValueError: a `step`
            that is not a whole number of at least 1.

        >>> import gradclip
        >>> import numpy as np
        >>> monitor = Monitor()
        >>> monitor.note(loss=0.25)
        >>> norm = gradclip.clip_grad_norm_(np.ones(25), 1.0, monitor=monitor)
        >>> monitor.last.norm, monitor.last.loss
        (5.0, 0.25)

        """
        number = None if step is None else setting("step", step, 1)
        for one in (self, *self._groups.values()):
            one._history.note(Note.of(loss, context, alone=True)._replace(step=number))

    def _watching(self) -> EachNorm | None:
        """Return what takes the norm of each gradient in the next call, for `watched`; None if not needed."""
        return self._history.watching()

    def _watched(self, each: EachNorm | None) -> None:
        """Take the norms of the gradients of the call that this thread records next."""
        self._history.note(Note(each=each))

    def _missed(self, each: EachNorm | None) -> None:
        """Take the norms of the gradients of a call that raised because they are not finite."""
        self._history.add(Pending.of_missed(), Note(each=each))

    @with_advice
    def fetch(self) -> None:
        """Fetch the values of all steps recorded so far. Reading anything does this for you.

        Steps that cannot be fetched are left out, and `callback` is called for all others. Then the first error is
        raised. If another thread is calling `callback`, it goes on with these steps, and this call waits for it.
        """
        self._history.fetch()
        self._history.wait()

    def _tell(self, step: Step) -> None:
        if self.callback is not None:
            self.callback(step.step, step.numbers(self.top))

    @property
    def records(self) -> list[Step]:
        """The kept steps, oldest first."""
        return self._history.steps()

    @property
    def last(self) -> Step | None:
        """The last step; None before the first step."""
        return self._history.last()

    @property
    def columns(self) -> Columns:
        """The kept steps as arrays: steps, norms, max_norms, clipped, skipped, losses (NaN if not recorded)."""
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
    def spikes(self) -> list[Spike]:
        """The spikes kept, oldest first: their layers, losses and contexts. Print one for a sentence."""
        return self._history.spikes()

    @property
    def groups(self) -> dict[str, Monitor]:
        """The monitors of parameter groups, or of patterns of names, with thresholds of their own, by name."""
        return dict(self._groups)

    def _of_group(self, name: str) -> Monitor:
        """Return the monitor of a group with a threshold of its own; make it at the first call."""
        if name not in self._groups:
            tell = None if self.callback is None else partial(self._tell_of_group, name)
            self._groups[name] = made = Monitor(**self._history.settings, top=self.top, callback=tell)
            made._history.note(self._history.noted())
        return self._groups[name]

    def _tell_of_group(self, name: str, step: int, numbers: dict[str, float]) -> None:
        if self.callback is not None:
            self.callback(step, {f"groups/{name}/{key}": number for key, number in numbers.items()})

    def _overview(self) -> Overview:
        return Overview.of(self.records, self.counts, self.top, self.spikes, self._history.handling)

    @with_advice
    def advise(self) -> Advice:
        """Propose a threshold from the kept steps. Print the result for the proposal, its reasons and alternatives."""
        return advise(self.columns)

    @with_advice
    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the kept steps with matplotlib and return the figure. With a path, also save it there.

        Raises ModuleNotFoundError if matplotlib is not installed.
        """
        from gradclip._src.monitor.page.picture import draw

        figure = draw(self._overview())
        if path is not None:
            figure.savefig(path)
        return figure

    @with_advice
    def report(
        self,
        path: str | Path,
        title: str = "What gradient clipping did",
        *,
        context: Mapping[str, object] | None = None,
        date: datetime | None = None,
    ) -> Path:
        """Write a self-contained HTML page with pictures and numbers, and return its path.

        `context` is a dict of what else to say of the run, such as `{"seed": 0}`. `date` is the date to write, by
        default now. Raises ModuleNotFoundError if matplotlib is not installed, TypeError for another `context`.
        """
        from gradclip._src.monitor.page.page import page

        written = Path(path)
        written.write_text(page(self._overview(), title, context, date), encoding="utf-8")
        return written

    @with_advice
    def save(self, path: str | Path) -> None:
        """Write the kept steps as lines of JSON, one per step."""
        Path(path).write_text("".join(f"{to_line(step)}\n" for step in self.records), encoding="utf-8")

    @classmethod
    @with_advice
    def load(cls, path: str | Path, capacity: int | None = None) -> Monitor:
        """Return a monitor with the steps that `save` wrote: all, or the last `capacity`.

        Without `capacity`, its capacity is the number of steps in the file, but at least 10,000. Its counts cover the
        steps in the file. Raises ValueError for a line that is not a step.
        """
        with Path(path).open(encoding="utf-8", errors="backslashreplace") as file:
            steps = list(from_lines(file))
        monitor = cls(max(_CAPACITY, len(steps)) if capacity is None else capacity)
        monitor._history.replace(State(steps, Counts().plus(steps), 0, None))
        return monitor

    @with_advice
    def state_dict(self) -> dict[str, Any]:
        """Return the kept steps and the counts as lists and numbers, for any checkpoint format."""
        groups = {name: one.state_dict() for name, one in self._groups.items()}
        return self._history.state().plain() | ({"groups": groups} if groups else {})

    @with_advice
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`. It replaces the steps and counts; capacity and settings do not change.

        Raises ValueError if it is not a state of a `Monitor`, and says what is wrong; the monitor then stays unchanged.
        """
        loaded, groups = State.of(state), groups_of(state)
        self._history.replace(loaded)
        self._groups = {}
        for name, one in groups.items():
            self._of_group(name).load_state_dict(one)
