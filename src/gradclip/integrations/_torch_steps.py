"""What a trainer's step is made of, for a monitor: its number, its loss, and which examples its batches hold."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
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
    """The loss and the context of the next step, of which a monitor is told.

    `optimizer`: that of the steps, in a loop that goes backward and steps as it likes. Then only backward passes count
    that reach its parameters, and only since their gradients were last removed.
    """

    def __init__(
        self, context: Callable[[Any], Any] | None, monitor: object, optimizer: Optimizer | None = None
    ) -> None:
        if not (context is None or callable(context)):
            raise TypeError(f"context must be a function of a batch, got {shown(context)}.")
        if context is not None and monitor is None:
            raise ValueError("context is recorded by a monitor. Pass monitor=gradclip.Monitor(), too.")
        self._context, self._optimizer = context, optimizer
        self._found: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.loss: Any = None
        self._batches: list[Any] = []
        self._taken = False

    def before_backward(self) -> None:
        """Look at the gradients before a backward pass. Begin a step if the last one was made, or they are removed."""
        left, self._found = self._found, self._gradients()
        if self._taken or not self._batches or not (any(self._found) or self._optimizer is None):
            self.begin()
        elif self._found != left:  # set to zero, perhaps: nobody knows what is left of earlier passes
            self.loss, self._batches = math.nan, [None]

    def after_backward(self, loss: Tensor | None, told: list[Any] | None) -> None:
        """Add a batch to the step if the backward pass reached the parameters."""
        before, self._found = self._found, self._gradients()
        if self._optimizer is None or self._found != before:
            self.add(loss, told)

    def _gradients(self) -> list[Any]:
        """Return what changes when a gradient is made, removed or written to."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        grads = [parameter.grad for group in groups for parameter in group["params"]]
        held = [getattr(grad, "_local_tensor", grad) for grad in grads]  # a DTensor counts no writes
        # A sum with create_graph=True is a new tensor, whose object in Python may be at the place of the old one.
        return [None if grad is None else (grad._cdata, grad._version) for grad in held]

    def take(self) -> tuple[Any, list[Any] | None]:
        """Return the loss and the context of a step, at which the next one begins; no loss and no context twice."""
        known = (None, None) if self._taken else (self.loss, self.context)
        self._taken = True
        return known

    def of_batch(self, batch: object, indices: list[Any] | None) -> list[Any] | None:
        """Return what tells a batch from others, in a list; None if nothing does."""
        return indices if self._context is None else [self._context(batch)]

    def add(self, loss: Any, told: list[Any] | None) -> None:
        """Add a batch to the step: a part of its loss, and what tells the batch from others."""
        if getattr(loss, "shape", None) == ():
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        if not (self._batches and told is self._batches[-1]):  # a batch may have several losses
            self._batches.append(told)

    @property
    def context(self) -> list[Any] | None:
        """What tells the batches of the step from others; None unless it is known of all of them."""
        if not self._batches or any(told is None for told in self._batches):
            return None
        return [one for told in self._batches for one in told]
