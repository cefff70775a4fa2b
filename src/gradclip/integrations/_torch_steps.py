"""What a trainer's step is made of, for a monitor: its number, its loss, and which examples its batches hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gradclip._src.words import shown


class BatchIndices:
    """The indices of the examples in each batch of a `DataLoader`, in the order in which it gives the batches.

    It stands in the loader for its sampler, until `stop()`. If others go through the loader too, it knows nothing.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._name = loader, "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = getattr(loader, self._name)
        self._put(self)
        self.begin()

    @classmethod
    def of(cls, loader: object) -> BatchIndices | None:
        """Follow a loader; None for one that may not give a batch for each list of indices, in their order."""
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            return None
        in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
        if isinstance(loader.dataset, IterableDataset) or not in_order:
            return None
        held = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return held if type(held) is cls else cls(loader)

    def stop(self) -> None:
        """Give the loader its sampler back."""
        self._put(self._sampler)

    def _put(self, sampler: object) -> None:
        object.__setattr__(self._loader, self._name, sampler)  # a DataLoader refuses to be changed

    def begin(self) -> None:
        """Expect that the trainer goes through the loader next."""
        self._runs = self._first = 0
        self._taken: deque[list[Any]] = deque()

    def batch(self, place: int) -> list[Any] | None:
        """Return the indices in the batch at this place, from 0; None if unknown. Places must not fall."""
        while self._taken and self._first < place:
            self._taken.popleft()
            self._first += 1
        return self._taken[0] if self._runs == 1 and self._taken and self._first == place else None

    def __iter__(self) -> Iterator[Any]:
        self._runs += 1  # when the first is taken: a loader with workers makes an iterator that it does not use
        taken: deque[list[Any]] = deque()
        self._taken = taken
        for given in self._sampler:
            if self._runs == 1:
                plain = given.tolist() if hasattr(given, "tolist") else given
                several = isinstance(plain, list) or (self._name == "batch_sampler" and isinstance(plain, tuple))
                taken.append([*plain] if several else [plain])
            yield given

    # To others it is the sampler.

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._sampler)


class StepNotes:
    """The loss and the context of the next step, of which a monitor is told."""

    def __init__(self, context: Callable[[Any], Any] | None, monitor: object) -> None:
        if not (context is None or callable(context)):
            raise TypeError(f"context must be a function of a batch, got {shown(context)}.")
        if context is not None and monitor is None:
            raise ValueError("context is recorded by a monitor. Pass monitor=gradclip.Monitor(), too.")
        self._context = context
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.loss: Any = None
        self._batches: list[Any] = []

    def of_batch(self, batch: object, indices: list[Any] | None) -> list[Any] | None:
        """Return what tells a batch from others, in a list; None if nothing does."""
        return indices if self._context is None else [self._context(batch)]

    def add(self, loss: Any, told: list[Any] | None) -> None:
        """Add a batch to the step: a part of its loss, and what tells the batch from others."""
        if getattr(loss, "shape", None) == ():
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        self._batches.append(told)

    @property
    def context(self) -> list[Any] | None:
        """What tells the batches of the step from others; None unless it is known of all of them."""
        if not self._batches or any(told is None for told in self._batches):
            return None
        return [one for told in self._batches for one in told]
