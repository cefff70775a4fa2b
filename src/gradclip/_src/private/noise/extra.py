"""What to say if a package of the extra `private` is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """If an import inside the block fails for want of a package, say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0].replace("_", "-")
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed. Run: pip install 'gradclip[private]'", name=error.name
        ) from error
