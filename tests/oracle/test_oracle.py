"""Calls give the bits that they gave when their results were frozen: those that every processor computes alike."""

import math

import pytest

from oracle import run
from oracle.cases import cases, table
from oracle.outcome import described, fingerprint

FRAMEWORKS = ("numpy", "torch")
ANY_LIBRARY = (2, 1, math.inf, -math.inf, None, "inf", "-inf", 0.5)
"""Orders of norms for which no power is taken, which libraries of mathematics round in different ways."""
FUNCTIONS = list(table())


def chosen(function):
    """Yield the cases of a function that do not depend on the machine."""
    for case, call in cases({function: table()[function]}):
        if case.framework in FRAMEWORKS and case.ord in ANY_LIBRARY:
            yield case, call


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_that_were_frozen(function):
    known = run.frozen()[function]
    found = [(case, fingerprint(case.outcome(call))) for case, call in chosen(function)]
    assert len(found) >= 10
    assert [case.name for case, value in found if known[case.framework][case.index] != value] == []


def test_every_case_is_frozen():
    known = run.frozen()
    numbers = {name: {engine: len(some) for engine, some in engines.items()} for name, engines in known.items()}
    assert numbers == {name: engines for name, (_, engines, _) in table().items()}
    assert sum(sum(some.values()) for some in numbers.values()) > 2_000


def test_names_are_different():
    names = [case.name for case, _ in cases()]
    assert len({*names}) == len(names)


def test_a_wrong_result_is_seen(monkeypatch, capsys):
    frozen = run.frozen()
    mine = [case for case, _ in chosen("global_norm") if case.framework == "numpy"]
    frozen["global_norm"]["numpy"][mine[0].index] = "0" * 16
    monkeypatch.setattr(run, "frozen", lambda: frozen)
    count, names = run.differing([case.name for case in mine])
    assert count >= len(mine) > 10
    assert names == [mine[0].name]
    assert capsys.readouterr().out == f"DIFFERS: {names[0]}\n"


def test_numbers_that_are_equal_but_not_the_same_differ():
    assert described(0.0) != described(-0.0)
    assert described(1) != described(1.0) != described(True)
    assert described([1.0]) != described((1.0,))
    assert described(ValueError("a")) != described(ValueError("b"))
    assert described(math.nan) == described(-math.nan)
