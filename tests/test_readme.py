"""The code on the pages prints what it says, and its tables are what trying finds and what was measured."""

import runpy
from pathlib import Path

import pytest

import code_blocks
import support_table

ROOT = Path(__file__).parent.parent
CODE_BLOCKS = {
    "README.md": 7,
    "docs/adaptive.md": 6,
    "docs/monitor.md": 4,
    "docs/optimizers.md": 3,
    "docs/per-example.md": 12,
    "docs/tensorflow.md": 3,
}


@pytest.mark.parametrize("page", CODE_BLOCKS)
def test_code_prints_what_stands_below_it(page):
    assert code_blocks.run(ROOT / page) == CODE_BLOCKS[page]


def test_code_and_output_stand_within_the_first_35_lines():
    lines = (ROOT / "README.md").read_text().splitlines()[:35]
    assert sum(line.startswith("```") for line in lines) >= 6
    assert "13.0 [1.5 2. ] [6.]" in lines


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_table_is_what_trying_finds():
    assert support_table.current() == support_table.table()


def test_trying_finds_what_does_not_work():
    assert not support_table.works(lambda: 1 / 0, 1.0)
    assert not support_table.works(lambda: [1.0, 2.0], support_table.np.array([1.0, 3.0]))


def test_every_function_of_arrays_is_in_the_table():
    import gradclip

    others = {
        "native_status",
        "check_sensitivity",
        "clipped_fun",
        "clipped_grad",
        "clipped_sum_sensitivity",
        "norm_at_most",
        "partial_norm",
    }
    functions = {name for name in gradclip.__all__ if name[0].islower()} - others
    assert functions == set(support_table.TREE_FUNCTIONS) | set(support_table.IN_PLACE)


def test_the_times_are_those_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["TABLES"]
    assert [table.on_page() for table in tables] == [table.current() for table in tables]
