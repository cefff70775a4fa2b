"""Drop-in replacements for other libraries' clipping functions: to switch, change one import."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(integration: str) -> Iterator[None]:
    """If an import inside the block fails, say which package to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "gradclip"):
            raise
        package = {"haiku": "dm-haiku"}.get(missing, missing)
        raise ModuleNotFoundError(
            f"gradclip.integrations.{integration} needs {package}, which is not installed. Run: pip install {package}",
            name=error.name,
            path=error.path,
        ) from error
