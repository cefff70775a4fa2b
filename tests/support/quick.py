"""Which of the collected tests `make test` runs. The others are run by `make test-all`.

`tests/times.json` has the processor seconds of each case that takes `CHEAP` or more; `make times` writes it. Of each
function as few cheap cases as have every value that a cheap case has. Of a function without a cheap case the cheapest,
if that takes less than `DEAR`. Of a file that would run nothing the cheapest case, whatever it takes.
"""

import json
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CHEAP, DEAR = 0.3, 1.0
TIMES = Path(__file__).parents[1] / "times.json"
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
    """Return the items that `make test` runs, which depend only on the items, their order and the times."""
    files: dict[str, dict[str, list[Any]]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            files.setdefault(file_of(item), {}).setdefault(function_of(item), []).append(item)
    return [item for functions in files.values() for item in of_file(functions.values())]


def of_file(functions: Iterable[list[Any]]) -> list[Any]:
    """Return the cases of a file that are run, at least one."""
    picked = [case for cases in functions for case in of_function(cases)]
    return picked or [min((case for cases in functions for case in cases), key=seconds)]


def of_function(cases: list[Any]) -> list[Any]:
    """Return the cases of a function that are run."""
    cheap = [case for case in cases if seconds(case) < CHEAP]
    if cheap:
        return cheap if every_case(cases[0]) else list(each_value_once(cheap))
    cheapest = min(cases, key=seconds)
    return [cheapest] if seconds(cheapest) < DEAR else []


@cache
def times() -> dict[str, dict[str, float]]:
    """Return the seconds of the cases that are not cheap, by file."""
    found: dict[str, dict[str, float]] = json.loads(TIMES.read_text())
    return found


def seconds(item: Any) -> float:
    """Return what a case takes; nothing if it is cheap or not known."""
    file, _, case = item.nodeid.partition("::")
    return times().get(file, {}).get(case, 0.0)


def file_of(item: Any) -> str:
    """Return the name of the file that a test is in."""
    return item.nodeid.partition("::")[0]


def function_of(item: Any) -> str:
    """Return the name of the test function, which its cases share."""
    return item.nodeid.partition("[")[0]


def every_case(item: Any) -> bool:
    """Say whether all cheap cases of the item's function are chosen."""
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
