"""The warning and the error about mistakes in how gradients are clipped, and where the user's code made them."""

import sys

from gradclip._src.public import public


@public
class ClippingWarning(UserWarning):
    """A mistake in how gradients are clipped, found by `gradclip.guard`."""


@public
class ClippingError(RuntimeError):
    """A mistake found by `gradclip.guard` with `on_mistake="raise"`, or more skipped steps than `stop_after` allows."""


def level_of_user() -> int:
    """Return the `stacklevel` with which the caller of this function warns about the user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("gradclip", "torch"):
        frame, level = frame.f_back, level + 1
    return level
