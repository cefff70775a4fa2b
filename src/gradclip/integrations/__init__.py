"""Drop-in replacements for other libraries' clipping functions: to switch, change one import."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradclip._src.backends.imported import check_release


@contextmanager
def needed_for(integration: str, framework: str = "") -> Iterator[None]:
    """If an import inside the block fails, say which package to install. Raise if the framework is too old."""
    try:
        yield
    except Exception as error:
        check_release(framework)  # with an old release, anything may be missing
        if not isinstance(error, ModuleNotFoundError):
            raise
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "gradclip"):
            raise
        package = {"haiku": "dm-haiku"}.get(missing, missing)
        raise ModuleNotFoundError(
            f"gradclip.integrations.{integration} needs {package}, which is not installed. Run: pip install {package}",
            name=error.name,
            path=error.path,
        ) from error
    check_release(framework)
