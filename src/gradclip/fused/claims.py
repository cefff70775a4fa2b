"""An `AdaptiveNorm` or a `Monitor` follows the norms of one optimizer: two would take turns in its history."""

import gc
import weakref
from typing import Any, Protocol

from gradclip.adaptive.holder import AdaptiveNorm
from gradclip.monitor.monitor import Monitor


class Holder(Protocol):
    """What clips at the steps of an optimizer."""

    @property
    def attached(self) -> bool:
        """Whether it still clips."""


_held: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def check_free(given: object, holder: Holder | None = None) -> None:
    """Raise a ValueError if another optimizer's clipping has what is given, an `AdaptiveNorm` or a `Monitor`."""
    if _other(given, holder) is None:
        return
    gc.collect()  # an optimizer and what clips it hold each other
    if _other(given, holder) is not None:
        raise ValueError(
            f"this {type(given).__name__} already follows another optimizer. Pass each optimizer its own, or call "
            "remove() of what clips the other."
        )


def _other(given: object, holder: Holder | None) -> Holder | None:
    found = _held[given]() if isinstance(given, AdaptiveNorm | Monitor) and given in _held else None
    return found if found is not None and found is not holder and found.attached else None


def claim(given: object, holder: Holder) -> None:
    """Note who has it, after `check_free`."""
    if isinstance(given, AdaptiveNorm | Monitor):
        _held[given] = weakref.ref(holder)
