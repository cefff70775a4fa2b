"""Drop-in replacements for other libraries' clipping functions: to switch, change one import.

Each module has the name of its library, which is imported when the module is used.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from gradclip._src.words import no_attribute


def __getattr__(name: str) -> ModuleType:
    """Import the module of a library on first access. AttributeError if it is not there, or its library is not."""
    if name not in _names():
        raise no_attribute(name, sys.modules[__name__])
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise AttributeError(str(error), name=name) from error


def __dir__() -> list[str]:
    """Return the modules that are imported. `help` asks for each of these names, and finds the others as files."""
    return [name for name in _names() if name in globals()]


def _names() -> list[str]:
    return [one.name for one in iter_modules(__path__) if not one.name.startswith("_")]
