"""The table of parity: made again, quickly, and compared with what is committed."""

import os
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from side_by_side import page, record, run
from side_by_side.reasons import REASONS, reason_for

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
COMMITTED = record.read()
LIBRARIES = [name for name in run.MODULES if name != "Lucid"]
FEW_INPUTS = 40


@pytest.fixture(autouse=True)
def _variables_of_the_libraries_are_gone_afterwards():
    with mock.patch.dict(os.environ):
        yield


def different(name):
    """Yield function, case and why of the committed rows that differ."""
    for function, of in COMMITTED["libraries"][name]["functions"].items():
        for case, (kind, why, *_) in of["cases"].items():
            if kind == "different":
                yield function, case, why


@pytest.mark.parametrize("name", LIBRARIES)
def test_verdicts_are_those_of_the_table(name):
    library, committed = run.library(name), COMMITTED["libraries"][name]
    assert library.version == committed["version"]
    assert [function.name for function in library.functions] == list(committed["functions"])
    found = list(run.rows(library, quick=True))
    assert len(found) > 50
    for row in found:
        function, case, kind, why = (row[key] for key in ("function", "case", "kind", "why"))
        assert [kind, why] == committed["functions"][function]["cases"][case][:2], row
        assert kind != "different" or reason_for(name, function, case, why) is not None, row
        # The reason says what ours is: NaN, an error, a format. Only the last digits are free.
        if kind == "different" and why != "values":
            assert row["ours"] == committed["functions"][function]["cases"][case][3], row


@pytest.mark.parametrize("name", LIBRARIES)
def test_our_bound_is_kept_on_random_inputs(name):
    for function in run.library(name).functions:
        if function.formats:
            bound = run.bound_of(function, function.ours, FEW_INPUTS)
            assert bound == (FEW_INPUTS, 0.0, 0.0), function.name


def test_all_libraries_are_in_the_table():
    assert list(COMMITTED["libraries"]) == list(run.MODULES)


def test_our_bound_is_kept_throughout_the_table():
    for found in COMMITTED["libraries"].values():
        for name, of in found["functions"].items():
            assert of["bound"] is None or of["bound"]["ours"]["kept"] == COMMITTED["inputs"] == 1000, name


@pytest.mark.parametrize("name", run.MODULES)
def test_each_difference_has_its_reason(name):
    assert [row for row in different(name) if reason_for(name, *row) is None] == []


def test_reasons_are_sentences_of_the_page_and_each_is_needed():
    text = " ".join(DIFFERENCES.read_text().split())
    used = Counter(reason_for(name, *row) for name in run.MODULES for row in different(name))
    for reason in REASONS:
        assert reason.text in text
        assert used[reason] > 0, reason


def test_the_page_is_what_the_record_makes():
    assert page.FILE.read_text() == page.page(COMMITTED)


def test_the_page_can_be_read():
    text = page.FILE.read_text()
    assert len(re.sub("<details.*?</details>", "", text, flags=re.S).splitlines()) <= 150
    assert "DIFFERENT" not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {6, 9}


def test_a_row_without_its_reason_is_shown():
    cells = ["different", "values", "1", "2", "3"]
    functions = {"clip": {"bound": None, "cases": {"NaN": cells}}}
    made = page.page({"inputs": 1, "libraries": {"PyTorch": {"version": "0", "functions": functions}}})
    assert "| NaN: `clip` | 1 | 2 | 3 | DIFFERENT, without a reason: values |" in made
    assert "Not run when this page was written: optax" in made


def test_what_is_written_is_read_back(tmp_path):
    record.write(COMMITTED, tmp_path / "parity.json")
    assert record.read(tmp_path / "parity.json") == COMMITTED
    assert (tmp_path / "parity.json").read_text() == record.FILE.read_text()
    assert record.read(tmp_path / "none.json") == {"inputs": 1000, "libraries": {}}
