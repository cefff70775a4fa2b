import json
import sys
from itertools import product

import pytest
from typer.testing import CliRunner

from gradclip._src.cli.commands import app

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
WRITTEN = {"demo.png", "report.html", "results.json"}


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of a few steps, with more seeds and rates than one and a threshold that clips some steps."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return run("demo", "--steps", 7, "--seeds", 2, "--rates", "0.01,0.1", "--max-norm", 0.9, "--out", out), out


def results(demo):
    return json.loads((demo[1] / "results.json").read_text())


def test_demo_succeeds_and_names_what_it_wrote(demo):
    result, out = demo
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == WRITTEN
    for name in WRITTEN:
        assert str(out / name) in result.output


def test_demo_prints_the_table_and_the_summary(demo):
    printed = " ".join(demo[0].output.split())
    assert "no clipping fixed, 0.9 adaptive" in printed
    for one in results(demo)["runs"]:
        least, most = min(one["test_accuracy"]), max(one["test_accuracy"])
        assert f"{one['median']:.1%} ({100 * least:.1f} to {100 * most:.1f})" in printed
    assert results(demo)["summary"] in printed


def test_demo_draws_a_picture(demo):
    picture = (demo[1] / "demo.png").read_bytes()
    assert picture.startswith(PNG_SIGNATURE)
    assert len(picture) > 20_000


def test_demo_writes_the_report_of_the_run_it_shows(demo):
    page = (demo[1] / "report.html").read_text()
    assert "of 7 steps clipped" in page
    assert f"learning rate {results(demo)['shown_rate']:g}, adaptive threshold, seed 0" in page
    for layer in ("recurrent", "input", "bias", "output", "output_bias"):
        assert f">{layer}<" in page


def test_demo_writes_every_number(demo):
    found = results(demo)
    assert found["settings"] == {
        "steps": 7,
        "seeds": 2,
        "rates": [0.01, 0.1],
        "max_norm": 0.9,
        "out": str(demo[1]),
    }
    kinds = ("none", "fixed", "adaptive")
    assert [(one["clipping"], one["rate"]) for one in found["runs"]] == list(product(kinds, (0.01, 0.1)))
    for one in found["runs"]:
        assert len(one["test_accuracy"]) == len(one["clipped_share"]) == len(one["diverged"]) == 2
    none, fixed, _ = found["runs"][::2]
    assert none["clipped_share"] == [0, 0]
    assert min(fixed["clipped_share"]) > 0


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


def test_a_folder_that_takes_no_files_is_known_before_training():
    result = run("demo", "--out", "/proc")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: could not write to '/proc': ")


def test_a_missing_library_of_the_demo_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "gradclip._src.demo.run", raising=False)
    monkeypatch.delitem(sys.modules, "gradclip._src.demo.picture")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("demo", "--steps", 1, "--seeds", 1, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "The demo needs matplotlib, not installed" in result.stderr
    assert "pip install '.[demo]' in a clone of gradclip" in result.stderr
