"""What `make test` runs: every value of each parameter, and every case of what may not be passed over."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import quick
import test_clip_everywhere as everywhere
from frameworks import ALL

TESTS = Path(__file__).parent
LAYOUTS = {"whole", "groups", "rows", "examples"}


@pytest.fixture
def collected(pytestconfig):
    """What this run has collected, before any of it was deselected; in `make test`, everything."""
    return pytestconfig.stash[quick.COLLECTED]


def marked(item, *names):
    return any(map(item.get_closest_marker, names))


def test_every_value_of_each_parameter_is_run(collected):
    tests = [item for item in collected if not marked(item, "slow")]
    every = {(quick.function_of(item), value) for item in tests for value in quick.values(item)}
    run = {(quick.function_of(item), value) for item in tests if marked(item, "quick") for value in quick.values(item)}
    assert every == run
    assert {quick.function_of(item) for item in tests} == {quick.function_of(i) for i in tests if marked(i, "quick")}


def test_every_case_is_run_of_what_may_not_be_passed_over(collected):
    whole = [i for i in collected if i.nodeid.startswith(quick.EVERY_CASE_IN) or marked(i, *quick.EVERY_CASE_OF)]
    assert [item.nodeid for item in whole if not marked(item, "quick")] == []


@pytest.mark.parametrize("folder", quick.EVERY_CASE_IN)
def test_the_folders_that_are_run_whole_are_there(folder):
    assert list((TESTS.parent / folder).glob("test_*.py"))


def test_every_framework_meets_every_layout():
    assert everywhere.pytestmark.name == "every_case"
    cases = {}
    for name in ("test_new_arrays", "test_in_place"):
        marks = [mark.args for mark in getattr(everywhere, name).pytestmark if mark.name == "parametrize"]
        cases[name] = {parameter: list(values) for parameter, values in marks}
    assert cases["test_new_arrays"] == {"framework": list(ALL), "layout": list(everywhere.NEW)}
    assert set(everywhere.NEW) == LAYOUTS
    assert cases["test_in_place"]["framework"] == [framework for framework in ALL if not framework.jit]
    assert set(everywhere.IN_PLACE) == LAYOUTS - {"examples"}  # of which nothing is clipped in place


def case(name, *marks, **parameters):
    """Return what stands for a collected test."""
    ids = f"[{'-'.join(map(quick.text, parameters.values()))}]" if parameters else ""
    item = SimpleNamespace(nodeid=name + ids, get_closest_marker=lambda mark: mark in marks or None)
    if parameters:
        item.callspec = SimpleNamespace(params=parameters)
    return item


def product(name, *marks):
    return [case(name, *marks, a=a, b=b) for a in (1, 2) for b in (1, 2, 3)]


def names(items):
    return [item.nodeid for item in items]


def test_few_cases_have_every_value():
    assert names(quick.chosen(product("t.py::test"))) == ["t.py::test[1-1]", "t.py::test[2-2]", "t.py::test[1-3]"]


def test_each_function_has_its_own_values():
    items = [*product("t.py::one"), case("t.py::alone"), *product("t.py::two")]
    assert names(quick.chosen(items))[:4] == ["t.py::one[1-1]", "t.py::one[2-2]", "t.py::one[1-3]", "t.py::alone"]
    assert len(quick.chosen(items)) == 7


@pytest.mark.parametrize("name", ["tests/exact/t.py::test", "tests/native/t.py::test"])
def test_folders_are_run_whole(name):
    assert len(quick.chosen(product(name))) == 6


@pytest.mark.parametrize("mark", quick.EVERY_CASE_OF)
def test_marked_tests_are_run_whole(mark):
    assert len(quick.chosen(product("t.py::test", mark))) == 6


def test_slow_tests_are_left_to_the_other_command():
    assert quick.chosen([case("t.py::test", "slow"), *product("tests/native/t.py::test", "slow")]) == []


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, 1.0, True), (10**5000, 10**5000 + 1), ([1], [2])], ids=len)
def test_values_are_told_apart(values):
    assert len(quick.chosen([case("t.py::test", a=value, b=0) for value in values])) == len(values)
