"""Libraries that are imported: whether they are recent enough, and code to run once they are there.

gradclip itself imports none. An older release than `OLDEST` is left alone, and its arrays are refused. pyproject.toml
states the same releases.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.abc import Loader

T = TypeVar("T")

OLDEST = {"torch": (2, 6), "jax": (0, 9), "tensorflow": (2, 21), "keras": (3, 15), "mlx": (0, 32)}


def is_recent(name: str) -> bool:
    """Say whether an imported library is recent enough. A version that cannot be read counts as recent."""
    return needed_instead(name, _version(name)) is None


def check_release(name: str) -> None:
    """Raise an ImportError if an imported library is too old."""
    found = _version(name)
    wanted = needed_instead(name, found)
    if wanted is not None:
        package = name.partition(".")[0]
        raise ImportError(
            f"gradclip needs {package} {wanted} or newer, but {package} {found} is imported. Run: pip install "
            f"'{package}>={wanted}'. Or pass NumPy arrays.",
            name=name,
        )


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


def needed_instead(name: str, version: str) -> str | None:
    """Return the oldest release that gradclip works with if a library's version is older; else None."""
    oldest = OLDEST.get(name.partition(".")[0])  # of mlx.core, that of the package
    numbers = version.split(".")[:2]
    if oldest is None or len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return None
    return ".".join(map(str, oldest)) if tuple(map(int, numbers)) < oldest else None


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", ""))


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once a module is imported, or right away if it already is."""
    if sys.modules.get(name) is not None:
        then()
        return
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _Watch) and finder.name == name]
    if waiting:  # two finders of one name would ask each other forever
        waiting[0].then.append(then)
    else:
        # First in the list, before the finders that locate the module.
        sys.meta_path.insert(0, _Watch(name, [then]))


def exportable(record: type[T]) -> type[T]:
    """Let programs that `jax.export` writes to a file take and return a named tuple."""
    name = f"gradclip.{record.__name__}"

    def register() -> None:
        # JAX knows the name already if gradclip is imported again, as notebooks that reload modules do.
        with suppress(ValueError):
            sys.modules["jax.export"].register_namedtuple_serialization(record, serialized_name=name)

    when_imported("jax.export", register)
    return record


class _Watch:
    """A finder that lets the others find the module and calls back once it has run. Finding alone does nothing."""

    def __init__(self, name: str, then: list[Callable[[], None]]) -> None:
        self.name = name
        self.then = then
        self.asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # While it asks the others, it finds nothing: one of an earlier import of gradclip asks all others too.
        if fullname != self.name or self.asking:
            return None
        self.asking = True
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            # Do not call back yet: `importlib.util.find_spec` also gets here, and imports nothing.
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: "Loader") -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # A loader may run several modules, or the same module again.
            if module.__name__ == self.name and self in sys.meta_path:
                sys.meta_path.remove(self)
                for then in self.then:
                    then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
