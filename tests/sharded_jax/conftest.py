"""In place of the one above, which imports the other frameworks."""

from quick import pytest_collection_modifyitems  # noqa: F401
