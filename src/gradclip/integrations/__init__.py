"""Other libraries' own names and signatures, on this library's engine: switch by changing one import."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(integration: str) -> Iterator[None]:
    """Say what to install where one of the imports inside fails."""
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
