"""The kernels in use and the versions of installed libraries, read from metadata so that nothing is imported."""

import platform
from importlib.metadata import PackageNotFoundError, version

from gradclip._src.backends.gpu_switch import status_text
from gradclip._src.backends.imported import needed_instead
from gradclip._src.native import native_status

LIBRARIES = (
    "numpy",
    "optree",
    "array-api-compat",
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "opacus",
    "jax-privacy",
    "brainstate",
    "declearn",
    "tensorflow",
    "keras",
    "mlx",
)


def info_text() -> str:
    """Return one line for each kind of kernels in use, and one for the version of each library."""
    lines = {"native kernels": str(native_status()), "gpu kernels": status_text()}
    lines |= {name: _shown(name, version) for name, version in installed_versions().items()}
    return "\n".join(f"{name:<18} {text}" for name, text in lines.items())


def version_text() -> str:
    """Return the name and the version of gradclip."""
    return f"gradclip {_version('gradclip') or 'of unknown version'}"


def installed_versions() -> dict[str, str | None]:
    """Return versions by name, gradclip and Python first; None if a library is not installed."""
    versions: dict[str, str | None] = {"gradclip": _version("gradclip")}
    versions["python"] = platform.python_version()
    versions.update((name, _version(name)) for name in LIBRARIES)
    versions["tensorflow"] = versions["tensorflow"] or _version("tensorflow-cpu")
    return versions


def _shown(name: str, version: str | None) -> str:
    if version is None:
        return "not installed"
    wanted = needed_instead(name, version)
    return version if wanted is None else f"{version} (too old: gradclip needs {wanted})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
