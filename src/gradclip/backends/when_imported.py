"""Run code once a framework is imported: now, or later when somebody imports it. gradclip itself imports none."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.abc import Loader

T = TypeVar("T")


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
    when_imported(
        "jax.export",
        lambda: sys.modules["jax.export"].register_namedtuple_serialization(record, serialized_name=name),
    )
    return record


class _Watch:
    """A finder that lets the others find the module and calls back once it has run. Finding alone does nothing."""

    def __init__(self, name: str, then: list[Callable[[], None]]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Skip this finder, or it would call itself forever.
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
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
