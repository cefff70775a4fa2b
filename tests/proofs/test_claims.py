"""Each proof fails with a constant that is loosened too far, and holds with what it says is enough."""

import importlib
from fractions import Fraction

import pytest
import run
from claim import Claim, Refuted
from gappa import literal, proves

CLAIMS = run.claims()


def cases(kind):
    return [
        pytest.param(claim, one, id=f"{claim.script}-{claim.name}-{one.name}".replace(" ", "_"))
        for claim in CLAIMS
        for one in getattr(claim, kind)
    ]


def change(monkeypatch, constant):
    module, _, name = constant.name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, constant.value)


@pytest.mark.parametrize(("claim", "constant"), cases("loosened"))
def test_a_loosened_constant_refutes_the_claim(claim, constant, monkeypatch):
    change(monkeypatch, constant)
    with pytest.raises(Refuted):
        claim.check()


@pytest.mark.parametrize(("claim", "constant"), cases("enough"))
def test_so_much_is_enough(claim, constant, monkeypatch):
    change(monkeypatch, constant)
    claim.check()


def test_each_claim_of_a_script_names_a_module_whose_docstring_names_the_script():
    for claim in CLAIMS:
        assert f"proofs/{claim.script}" in importlib.import_module(claim.module).__doc__, claim


def test_a_hint_that_is_no_equation_is_a_mistake():
    assert not proves("{ x in [1, 2] -> x * x <= 1 }\n")
    with pytest.raises(RuntimeError, match="cannot read"):
        proves("{ x in [1, 2] -> x * x <= 1 }\nx * x -> x - x;\n")


def test_a_rounding_that_rounds_nothing_is_a_mistake():
    with pytest.raises(RuntimeError, match="cannot read"):
        proves("y float32= x;\n{ x in [1, 2] -> y - x in [0, 0] }\n")


def test_a_script_with_a_mistake_is_not_one_that_is_refused():
    with pytest.raises(RuntimeError, match="cannot read"):
        proves("{ x in [1, 2] -> x <= 2; }\n")


def test_bounds_are_exact_or_refused():
    assert literal(0.75) == "3b-2"
    assert literal(-24) == "-3b3"
    with pytest.raises(ValueError, match="binary fraction"):
        literal(Fraction(1, 3))


def test_what_is_not_proven_is_not_called_proven(monkeypatch):
    def refuted():
        raise Refuted("nothing proves this")

    found = [Claim("one", "os", "a.py", lambda: "margin"), Claim("two", "os", "b.py", refuted)]
    monkeypatch.setattr(run, "claims", lambda: found)
    assert run.checked(0)[:2] == (True, "margin")
    assert run.checked(1)[:2] == (False, "nothing proves this")
