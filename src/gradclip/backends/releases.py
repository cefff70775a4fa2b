"""The oldest releases that gradclip works with. An older one is left alone, and its arrays are refused.

pyproject.toml states the same releases.
"""

import sys

OLDEST = {"torch": (2, 6), "jax": (0, 9), "tensorflow": (2, 21), "keras": (3, 15)}


def is_recent(name: str) -> bool:
    """Say whether an imported library is recent enough. A version that cannot be read counts as recent."""
    return needed_instead(name, _version(name)) is None


def check_release(name: str) -> None:
    """Raise an ImportError if an imported library is too old."""
    found = _version(name)
    wanted = needed_instead(name, found)
    if wanted is not None:
        raise ImportError(
            f"gradclip needs {name} {wanted} or newer, but {name} {found} is imported. Run: pip install "
            f"'{name}>={wanted}'. Or pass NumPy arrays.",
            name=name,
        )


def needed_instead(name: str, version: str) -> str | None:
    """Return the oldest release that gradclip works with if a library's version is older; else None."""
    oldest = OLDEST.get(name)
    numbers = version.split(".")[:2]
    if oldest is None or len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return None
    return ".".join(map(str, oldest)) if tuple(map(int, numbers)) < oldest else None


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", ""))
