"""What `make test` runs: every value of each parameter that is cheap, and every file."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import processor_time
import quick

TESTS = Path(__file__).parents[1]
FUNCTION = "t.py::test"


@pytest.fixture
def collected(pytestconfig):
    """What this run has collected, before any of it was deselected; in `make test`, everything."""
    return pytestconfig.stash[quick.COLLECTED]


def marked(item, *names):
    return any(map(item.get_closest_marker, names))


def test_every_value_that_is_cheap_is_run(collected):
    cheap = [item for item in collected if not marked(item, "slow") and quick.seconds(item) < quick.CHEAP]
    every = {(quick.function_of(item), value) for item in cheap for value in quick.values(item)}
    run = {(quick.function_of(item), value) for item in cheap if marked(item, "quick") for value in quick.values(item)}
    assert every == run
    assert {quick.function_of(item) for item in cheap} == {quick.function_of(i) for i in cheap if marked(i, "quick")}


def test_every_cheap_case_is_run_of_what_may_not_be_passed_over(collected):
    whole = [i for i in collected if i.nodeid.startswith(quick.EVERY_CASE_IN) or marked(i, *quick.EVERY_CASE_OF)]
    left = [item for item in whole if not marked(item, "quick")]
    assert [item.nodeid for item in left if quick.seconds(item) < quick.CHEAP and not marked(item, "slow")] == []


def test_every_file_is_run(collected):
    files = {quick.file_of(item) for item in collected if not marked(item, "slow")}
    assert files == {quick.file_of(item) for item in collected if marked(item, "quick")}


def test_times_are_of_tests_that_are_there(collected):
    """Of the files that this run has collected; `make times` writes the file anew."""
    names = {item.nodeid for item in collected}
    files = {quick.file_of(item) for item in collected}
    listed = {file: cases for file, cases in quick.times().items() if file in files}
    assert [
        f"{file}::{case}" for file, cases in listed.items() for case in cases if f"{file}::{case}" not in names
    ] == []
    assert [file for file in quick.times() if not (TESTS.parent / file).exists()] == []
    assert all(value >= quick.CHEAP for cases in quick.times().values() for value in cases.values())


@pytest.mark.parametrize("folder", quick.EVERY_CASE_IN)
def test_the_folders_that_are_run_whole_are_there(folder):
    assert list((TESTS.parent / folder).glob("test_*.py"))


@pytest.fixture
def times(monkeypatch):
    """The times of made-up tests, of which none is known at first."""
    known = {}
    monkeypatch.setattr(quick, "times", lambda: known)
    return known


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
    return [item.nodeid.partition("::")[2] for item in items]


def test_few_cases_have_every_value(times):
    assert names(quick.chosen(product(FUNCTION))) == ["test[1-1]", "test[2-2]", "test[1-3]"]


def test_each_function_has_its_own_values(times):
    items = [*product("t.py::one"), case("t.py::alone"), *product("t.py::two")]
    assert names(quick.chosen(items))[:4] == ["one[1-1]", "one[2-2]", "one[1-3]", "alone"]
    assert len(quick.chosen(items)) == 7


@pytest.mark.parametrize("name", ["tests/exact/t.py::test", "tests/native/t.py::test"])
def test_folders_are_run_whole(times, name):
    assert len(quick.chosen(product(name))) == 6


@pytest.mark.parametrize("mark", quick.EVERY_CASE_OF)
def test_marked_tests_are_run_whole_but_for_what_is_not_cheap(times, mark):
    assert len(quick.chosen(product(FUNCTION, mark))) == 6
    times["t.py"] = {"test[1-1]": 5.0}
    assert names(quick.chosen(product(FUNCTION, mark)))[0] == "test[1-2]"


def test_slow_tests_are_left_to_the_other_command(times):
    assert quick.chosen([case(FUNCTION, "slow"), *product("tests/native/t.py::test", "slow")]) == []


def test_a_value_is_met_in_a_cheap_case(times):
    times["t.py"] = {"test[1-1]": quick.CHEAP, "test[2-3]": 3.0, "test[1-3]": 3.0}
    assert names(quick.chosen(product(FUNCTION))) == ["test[1-2]", "test[2-1]"]


@pytest.mark.parametrize(("least", "run"), [(0.9, ["test[2-2]"]), (quick.DEAR, [])])
def test_a_function_without_a_cheap_case_runs_its_cheapest(times, least, run):
    times["t.py"] = dict.fromkeys(names(product(FUNCTION)), 2.0) | {"test[2-2]": least}
    assert names(quick.chosen([*product(FUNCTION), case("t.py::other")])) == [*run, "other"]


def test_a_file_runs_at_least_its_cheapest_case(times):
    times["t.py"] = {"one": 9.0, "two": 7.0}
    items = [case("t.py::one"), case("t.py::two"), case("other.py::test")]
    assert names(quick.chosen(items)) == ["two", "test"]


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, 1.0, True), (10**5000, 10**5000 + 1), ([1], [2])], ids=len)
def test_values_are_told_apart(times, values):
    assert len(quick.chosen([case(FUNCTION, a=value, b=0) for value in values])) == len(values)


def test_what_is_written_of_times():
    found = Counter({"a.py::slow[x::y]": 1.26, "a.py::quick": 0.1, "b.py::quick": 0.1})
    known = {"a.py": {"gone": 4.0}, "b.py": {"was slow": 3.0}, "c.py": {"slow": 2.0}}
    assert processor_time.listed(found, known) == {"a.py": {"slow[x::y]": 1.3}, "c.py": {"slow": 2.0}}
