"""The array API standard for NumPy arrays, imported lazily."""

import importlib
from types import ModuleType
from typing import Any


class Namespace(ModuleType):
    """The array API standard's operations for NumPy arrays, imported when the first one is used.

    The import takes a quarter of the time that importing gradclip takes, including NumPy.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("array_api_compat.numpy"), name)
        setattr(self, name, value)  # so that Python finds it next time without this method
        return value
