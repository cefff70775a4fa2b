"""Which of the collected tests `make test` runs. The others are run by `make test-all`."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

# Where an error of one case in a hundred would be an error of what gradclip is for.
EVERY_CASE_IN = ("tests/exact/", "tests/native/")


def chosen(items: Iterable[Any]) -> list[Any]:
    """Return the items of which `make test` consists, in an order that depends on nothing but theirs."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests.setdefault(function_of(item), []).append(item)
    return [item for cases in tests.values() for item in (cases if every_case(cases[0]) else each_value_once(cases))]


def function_of(item: Any) -> str:
    """Return the name of the test function, which its cases share."""
    return item.nodeid.partition("[")[0]


def every_case(item: Any) -> bool:
    marked = any(item.get_closest_marker(name) for name in ("after_error", "every_case"))
    return marked or item.nodeid.startswith(EVERY_CASE_IN)


def each_value_once(cases: list[Any]) -> Iterator[Any]:
    """Yield few cases that have every value of every parameter: each time the first that brings the most new ones."""
    left = set().union(*map(values, cases))
    if not left:
        yield from cases
    while left:
        best = max(cases, key=lambda case: len(values(case) & left))
        left -= values(best)
        yield best


def values(item: Any) -> set[Hashable]:
    """Return the values of a case, each with the name of its parameter. Told apart by their text, 0.0 is not -0.0."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, type(value), text(value)) for name, value in parameters.items()}


def text(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"at {id(value)}"
