"""Which of the collected tests `make test` runs. The others are run by `make test-all`."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import pytest

# Of these no case may be passed over.
EVERY_CASE_IN = ("tests/exact/", "tests/native/")
EVERY_CASE_OF = ("after_error", "every_case")
COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` asks for with `-m quick`. For a conftest.py, which imports this hook."""
    config.stash[COLLECTED] = list(items)
    for item in chosen(items):
        item.add_marker("quick")


def chosen(items: Iterable[Any]) -> list[Any]:
    """Return the items that `make test` runs, which depend only on the items and their order."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests.setdefault(function_of(item), []).append(item)
    return [item for cases in tests.values() for item in (cases if every_case(cases[0]) else each_value_once(cases))]


def function_of(item: Any) -> str:
    """Return the name of the test function, which its cases share."""
    return item.nodeid.partition("[")[0]


def every_case(item: Any) -> bool:
    """Say whether all cases of the item's function are chosen."""
    return item.nodeid.startswith(EVERY_CASE_IN) or any(map(item.get_closest_marker, EVERY_CASE_OF))


def each_value_once(cases: list[Any]) -> Iterator[Any]:
    """Yield few cases that have every value of every parameter: each time the first that has the most new ones."""
    values_of = {case.nodeid: values(case) for case in cases}
    left = set().union(*values_of.values())
    if not left:
        yield from cases
    while left:
        best = max(cases, key=lambda case: len(values_of[case.nodeid] & left))
        left -= values_of[best.nodeid]
        yield best


def values(item: Any) -> set[Hashable]:
    """Return the values of a case, each with the name of its parameter. By their texts 0.0 is told from -0.0."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, type(value), text(value)) for name, value in parameters.items()}


def text(value: Any) -> str:
    """Return what tells a value from others."""
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"at {id(value)}"
