"""What is attached to an optimizer, an engine or parameters until it is removed, or until the end of a `with`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NoReturn, Self

_LONGEST = 80


class Attached(ABC):
    """A handle: `remove()` ends it, and so does the end of `with`, also after an exception. Print it for what it does.

    >>> import torch, gradclip
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    >>> with gradclip.clip_at_step(optimizer, 1.0) as clipping:
    ...     print(clipping)
    StepClipping(SGD, max_norm=1.0, scope='global', fused=False, 0 steps)
    >>> clipping
    StepClipping(SGD, max_norm=1.0, scope='global', fused=False, 0 steps, removed)

    """

    @abstractmethod
    def remove(self) -> None:
        """End it. Called again, it does nothing."""

    @abstractmethod
    def _says(self) -> Sequence[str]:
        """Return what it does, in parts; the first is what it is attached to."""

    @property
    @abstractmethod
    def _is_removed(self) -> bool:
        """Whether it was removed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {self._called} cannot be copied or saved: the copy would be attached to nothing. Attach a new "
            "one to the copy. To save what it follows, save the state_dict() of the optimizer or the AdaptiveThreshold."
        )

    def __repr__(self) -> str:
        parts = [*self._says(), "removed" if self._is_removed else ""]
        return f"{self._called}({', '.join(filter(None, parts))})"

    _called = "Attached"


def as_passed(max_norm: object) -> str:
    """Return how a threshold was passed, cut if it is long."""
    text = f"max_norm={dict(max_norm) if isinstance(max_norm, Mapping) else max_norm!r}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def many(count: int, what: str) -> str:
    """Return how many there are of something."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
