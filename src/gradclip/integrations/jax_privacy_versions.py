"""What differs between releases of jax-privacy: its rule for NaN and infinities."""

import re
import sys
from importlib import metadata

_WHOLE_EXAMPLES_SINCE = (2, 3)


def skips_whole_examples() -> bool:
    """Say whether the release in use leaves out an example with NaN or infinities, as jax-privacy does since 2.3.

    Before, only the elements that are not finite count as 0. Where jax-privacy is not installed, the newest rule holds.
    """
    found = _version()
    return found is None or found >= _WHOLE_EXAMPLES_SINCE


def _version() -> tuple[int, ...] | None:
    """Return the first two numbers of the version that is loaded, or else installed; None if there is none."""
    text = getattr(sys.modules.get("jax_privacy"), "__version__", None)
    if text is None:
        try:
            text = metadata.version("jax-privacy")
        except metadata.PackageNotFoundError:
            return None
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
