"""What is to be done once a framework is there: at once, or when somebody imports it. gradclip imports none itself."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` after a module has been imported, which may be now."""
    if sys.modules.get(name) is not None:
        then()
    else:
        # First in the list, before those that find the module.
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch:
    """Lets the others find the module, and calls back once it has run. A mere look for it changes nothing."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Asked among the others, it would ask itself for ever.
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # Not called back yet: `importlib.util.find_spec` asks as well, and imports nothing.
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: "Loader") -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # A loader may run several modules, or one of them again.
            if module.__name__ == self.name and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
