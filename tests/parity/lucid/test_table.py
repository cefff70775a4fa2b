"""Lucid's rows of the table of parity, made again and compared with what is committed."""

from side_by_side import record, run
from side_by_side.reasons import reason_for

FEW_INPUTS = 100


def test_verdicts_are_those_of_the_table():
    library, committed = run.library("Lucid"), record.read()["libraries"]["Lucid"]
    assert library.version == committed["version"]
    found = list(run.rows(library))
    assert len(found) == sum(len(of["cases"]) for of in committed["functions"].values())
    for row in found:
        function, case, kind, why = (row[key] for key in ("function", "case", "kind", "why"))
        assert [kind, why] == committed["functions"][function]["cases"][case][:2], row
        assert kind != "different" or reason_for("Lucid", function, case, why) is not None, row


def test_our_bound_is_kept_on_random_inputs():
    for bound in run.bounds(run.library("Lucid"), FEW_INPUTS):
        assert bound["ours"]["kept"] == FEW_INPUTS, bound
