"""An `AdaptiveNorm` or a `Monitor` follows the norms of one optimizer: two would take turns in its history."""

import gc
import weakref
from collections.abc import Set
from typing import Any, Protocol

from gradclip._src.monitor.monitor import Monitor
from gradclip._src.thresholds.holder import AdaptiveNorm


class Holder(Protocol):
    """The clipping at the steps of an optimizer, or by an engine."""

    def follows(self, given: object) -> bool:
        """Return whether it clips, and records the norms in what is given."""

    def own(self) -> Set[int]:
        """Return the identities of the parameters whose gradients it clips, as far as they are known."""


_holders: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def check_free(given: object, parameters: Set[int] = frozenset(), holder: Holder | None = None) -> None:
    """Raise a ValueError if an `AdaptiveNorm` or a `Monitor` follows the optimizer of another holder.

    An optimizer made anew for some of the same parameters may take it over.
    """
    if _other(given, parameters, holder) is None:
        return
    gc.collect()  # an optimizer and what clips it hold each other
    if _other(given, parameters, holder) is not None:
        raise ValueError(
            f"this {type(given).__name__} already follows another optimizer. Pass each optimizer its own, or first "
            "call remove() of the handle that clips the other."
        )


def claim(given: object, holder: Holder) -> None:
    """Note which holder has an `AdaptiveNorm` or a `Monitor`."""
    if isinstance(given, AdaptiveNorm | Monitor):
        _holders[given] = weakref.ref(holder)


def take(given: AdaptiveNorm, holder: Holder) -> None:
    """Claim an `AdaptiveNorm` that a holder's parameter group may have got since. Raises as `check_free` does."""
    found = _holders.get(given)
    if found is None or found() is not holder:
        check_free(given, holder.own(), holder)
        claim(given, holder)


def _other(given: object, parameters: Set[int], holder: Holder | None) -> Holder | None:
    found = _holders[given]() if isinstance(given, AdaptiveNorm | Monitor) and given in _holders else None
    if found is None or found is holder or not found.follows(given):
        return None
    return None if parameters & found.own() else found
