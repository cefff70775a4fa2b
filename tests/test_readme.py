"""The code on the pages prints what it says, and its tables are what trying finds and what was measured."""

import json
import re
import runpy
from pathlib import Path

import pytest

import code_blocks
import support_table

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "README.md").read_text().split())
CODE_BLOCKS = {
    "docs/adaptive.md": 5,
    "docs/monitor.md": 3,
    "docs/optimizers.md": 2,
    "docs/tensorflow.md": 3,
}


@pytest.mark.parametrize("page", CODE_BLOCKS)
def test_code_prints_what_stands_below_it(page):
    assert code_blocks.run(ROOT / page) == CODE_BLOCKS[page]


def test_each_block_of_the_readme_runs_pasted_alone():
    assert code_blocks.run(ROOT / "README.md", alone=True) == 4


def test_the_readme_is_short_and_soon_shows_code_and_output():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1000
    assert sum(line.startswith("```") for line in text.splitlines()[:35]) >= 6


def test_what_it_claims_of_rounding_was_found():
    libraries = json.loads((ROOT / "docs" / "parity.json").read_text())["libraries"]
    found = []
    for library, function in (
        ("PyTorch", "clip_grad_norm_"),
        ("optax", "clip_by_global_norm"),
        ("TensorFlow", "clip_by_global_norm"),
    ):
        bound = libraries[library]["functions"][function]["bound"]
        assert bound["ours"]["kept"] == 1000
        found.append(bound["theirs"])
    least, most = (f"{(1000 - of(theirs['kept'] for theirs in found)) / 10:.0f}%" for of in (max, min))
    worst = f"{max(theirs['worst'] for theirs in found):.0e}".replace("-0", "-")
    assert (
        f"PyTorch, optax and TensorFlow exceed theirs on {least} to {most} of random inputs, by up to {worst} of the "
        "threshold in half types" in TEXT
    )


def times(name, kind):
    """Return the least and the largest time of a function, as multiples of gradclip's, in rows of some kinds."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "clipping.json").read_text())["rows"]
    found = [row["of ours"] for row in rows if row["name"] == name and re.fullmatch(kind, row["kind"])]
    return [f"{ratio:.2g}" for ratio in (min(found), max(found))]


def test_what_it_claims_of_speed_was_measured():
    theirs = " to ".join(times("torch.nn.utils.clip_grad_norm_", "torch .*"))
    assert f"PyTorch's function takes {theirs} times as long as gradclip's" in TEXT
    compiled = " to ".join(times("optax.clip_by_global_norm", "JAX (jitted|donated) .*"))
    assert f"optax's compiled one {compiled} times" in TEXT


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_what_the_monitor_says_is_what_the_demo_prints(page):
    printed = (ROOT / "docs" / "gallery" / "loss-spike.md").read_text()
    [line] = [block.code for block in code_blocks.blocks((ROOT / page).read_text()) if block.code.startswith("step ")]
    assert line in printed


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_table_is_what_trying_finds():
    assert support_table.current() == support_table.table()


def test_trying_finds_what_does_not_work():
    assert not support_table.works(lambda: 1 / 0, 1.0)
    assert not support_table.works(lambda: [1.0, 2.0], support_table.np.array([1.0, 3.0]))


def test_every_function_of_arrays_is_in_the_table():
    import gradclip

    others = {
        "add_noise",
        "audited_epsilon",
        "native_status",
        "check_sensitivity",
        "check_update",
        "clip_at_step",
        "clip_update_at_step",
        "clipped_fun",
        "clipped_grad",
        "clipped_sum_sensitivity",
        "explain_spike",
        "find_max_norm",
        "guard",
        "norm_at_most",
        "partial_norm",
    }
    functions = {name for name in gradclip.__all__ if name[0].islower()} - others
    assert functions == set(support_table.TREE_FUNCTIONS) | set(support_table.IN_PLACE)


def test_the_times_are_those_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["TABLES"]
    assert [table.on_page() for table in tables] == [table.current() for table in tables]
