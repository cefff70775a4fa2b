import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from gradclip.cli.commands import app

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
WRITTEN = {
    "demo.png",
    "monitor.png",
    "monitor_adaptive.png",
    "report.html",
    "report_adaptive.html",
    "results.json",
    "curves.json",
}


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of a few steps, on more seeds than one and with a threshold that clips some steps."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return run("demo", "--steps", 7, "--seeds", 2, "--max-norm", 0.9, "--out", out), out


def test_demo_succeeds_and_names_what_it_wrote(demo):
    result, out = demo
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == WRITTEN
    for name in WRITTEN:
        assert str(out / name) in result.output


def test_demo_prints_a_table_of_all_runs_and_the_summary(demo):
    result, out = demo
    table = result.output.partition("nonfinite")[2]
    assert "without clipping" in table
    assert "with gradclip" in table
    assert "adaptive" in table
    assert table.count("seed 0") == table.count("seed 1") == 3
    summary = json.loads((out / "results.json").read_text())["summary"]
    assert " ".join(summary.split()) in " ".join(result.output.split())


def test_demo_draws_a_picture(demo):
    for name in ("demo.png", "monitor.png", "monitor_adaptive.png"):
        picture = (demo[1] / name).read_bytes()
        assert picture.startswith(PNG_SIGNATURE)
        assert len(picture) > 20_000


def test_demo_writes_the_report_of_its_monitor(demo):
    page = (demo[1] / "report.html").read_text()
    norms = json.loads((demo[1] / "curves.json").read_text())["with gradclip"]["gradient_norm"][0]
    assert f"of {len(norms)} steps clipped" in page
    assert f"<dt>last norm</dt><dd>{norms[-1]:.4g}</dd>" in page
    for layer in ("recurrent", "input", "bias", "output", "output_bias"):
        assert f"<td>{layer}</td>" in page


def test_demo_writes_every_number(demo):
    results = json.loads((demo[1] / "results.json").read_text())
    assert results["settings"]["steps"] == 7
    assert results["settings"]["max_norm"] == 0.9
    assert [run["name"] for run in results["runs"]] == ["without clipping", "with gradclip", "adaptive"]
    for seed in (seed for run in results["runs"] for seed in run["seeds"]):
        assert set(seed) == {
            "seed",
            "outcome",
            "test_accuracy",
            "final_loss",
            "nonfinite_loss_steps",
            "largest_finite_norm",
            "first_nonfinite_norm_step",
            "clipped_share",
        }
    assert all(seed["clipped_share"] == 0 for seed in results["runs"][0]["seeds"])
    assert any(seed["clipped_share"] > 0 for seed in results["runs"][1]["seeds"])


def test_the_adaptive_run_follows_its_norms(demo):
    page = (demo[1] / "report_adaptive.html").read_text()
    norms = json.loads((demo[1] / "curves.json").read_text())["adaptive"]["gradient_norm"][0]
    assert f"<dt>last norm</dt><dd>{norms[-1]:.4g}</dd>" in page
    usual = 2 * sorted(norms[:-1])[len(norms[:-1]) // 2 - 1]  # the lower median of the six before, twice
    assert f"{usual:.4g}" in page


def test_both_runs_start_alike_and_clipping_parts_them(demo):
    curves = json.loads((demo[1] / "curves.json").read_text())
    plain, clipped = curves["without clipping"], curves["with gradclip"]
    assert np.shape(plain["loss"]) == np.shape(clipped["gradient_norm"]) == (2, 7)
    for name in ("loss", "gradient_norm"):
        first = [row[0] for row in plain[name]]
        assert first == pytest.approx([row[0] for row in clipped[name]], rel=1e-5)
    assert plain["loss"][0] != plain["loss"][1]
    assert plain["loss"][0][-1] != pytest.approx(clipped["loss"][0][-1], rel=1e-3)


def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    result = run("demo", "--out", file)
    assert result.exit_code == 2
    assert "out must be a folder" in result.stderr
    assert file.read_text() == "kept"


def test_a_folder_that_cannot_be_made_is_known_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("demo", "--out", tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: could not write to ")


def test_a_missing_library_of_the_demo_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "gradclip.demo.run", raising=False)
    monkeypatch.delitem(sys.modules, "gradclip.demo.picture")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("demo", "--steps", 1, "--seeds", 1, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "The demo needs matplotlib, not installed" in result.stderr
    assert "pip install '.[demo]' in a clone of gradclip" in result.stderr
