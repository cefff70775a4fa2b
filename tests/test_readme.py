"""The code on the pages prints what it says, and its tables are what trying finds and what was measured."""

import json
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest

import code_blocks
import support_table
from demo import DemoSettings
from demo_results import Sweep, Trained

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "README.md").read_text().split())
CODE_BLOCKS = {
    "docs/adaptive.md": 6,
    "docs/monitor.md": 6,
    "docs/optimizers.md": 3,
    "docs/per-example.md": 17,
    "docs/tensorflow.md": 3,
}


@pytest.mark.parametrize("page", CODE_BLOCKS)
def test_code_prints_what_stands_below_it(page):
    assert code_blocks.run(ROOT / page) == CODE_BLOCKS[page]


def test_each_block_of_the_readme_runs_pasted_alone():
    assert code_blocks.run(ROOT / "README.md", alone=True) == 6


def test_the_readme_is_short_and_soon_shows_code_and_output():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200
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
        assert f"{1000 - bound['theirs']['kept']} times in {library}" in TEXT
        found.append(bound["theirs"])
    single, half = (max(theirs[of] for theirs in found) for of in ("worst_float32", "worst"))
    assert (
        f"The excess is up to {single:.0e} of the threshold in float32 and {half:.0e} in half types".replace("-0", "-")
        in TEXT
    )


def test_what_it_claims_of_shards_was_found():
    layouts = json.loads((ROOT / "benchmarks" / "results" / "sharded.json").read_text())["layouts"]
    right = {of: sum(layout[of] == "right" for layout in layouts) for of in ("gradclip", "torch")}
    ours, theirs = f"{right['gradclip']} of {len(layouts)}", right["torch"]
    assert f"gradclip is right on {ours} layouts across processes. PyTorch's own function is right on {theirs} " in TEXT
    (large,) = (layout for layout in layouts if layout["layout"] == "float32 numbers of 1e25")
    assert large["torch"] == "wrong: inf, not 5.692e+25"
    assert "For float32 gradients of 1e25, PyTorch's norm is inf; gradclip's is 5.692e+25" in TEXT


def test_what_it_claims_of_speed_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "clipping.json").read_text())["rows"]
    of = {"workload": "GPT-2 small", "kind": "torch float32", "case": "not clipped"}
    ms = {row["name"].split()[0]: f"{row['ms']:.1f} ms" for row in rows if row.items() >= of.items()}
    assert (
        f"On a CPU, for GPT-2 small in float32 with nothing to clip, gradclip takes {ms['gradclip.clip_grad_norm_']}, "
        f"PyTorch {ms['torch.nn.utils.clip_grad_norm_']}, and a plain read of the same bytes {ms['floor']}" in TEXT
    )


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_its_picture_shows_what_the_demo_found(page):
    found = json.loads((ROOT / "docs" / "demo.json").read_text())
    assert found["summary"] in " ".join((ROOT / page).read_text().split())
    runs = [Trained(**{name: value for name, value in one.items() if name != "median"}) for one in found["runs"]]
    assert Sweep(runs, found["settings"]["max_norm"]).summary() == found["summary"]
    defaults = {name: value for name, value in asdict(DemoSettings()).items() if name != "out"}
    assert found["settings"].items() >= {**defaults, "rates": list(DemoSettings.rates)}.items()


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
