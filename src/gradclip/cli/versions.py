"""The versions of what is installed, read from package metadata so that nothing is imported."""

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = (
    "numpy",
    "optree",
    "array-api-compat",
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "jax-privacy",
    "brainstate",
    "declearn",
    "tensorflow",
    "keras",
)


def installed_versions() -> dict[str, str | None]:
    """Versions by name, gradclip and Python first; None stands for a library not installed."""
    versions: dict[str, str | None] = {"gradclip": _version("gradclip")}
    versions["python"] = platform.python_version()
    versions.update((name, _version(name)) for name in LIBRARIES)
    return versions


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
