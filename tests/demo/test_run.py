import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gradclip.cli import app as entry
from gradclip.cli.commands import app
from gradclip.demo.picture import write_picture
from gradclip.demo.results import describe_run, summarise
from gradclip.demo.settings import DemoSettings
from gradclip.demo.training import Curves

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


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
    assert {path.name for path in out.iterdir()} == {"demo.png", "results.json", "curves.json"}
    for name in ("demo.png", "results.json", "curves.json"):
        assert str(out / name) in result.output


def test_demo_prints_a_table_of_both_runs_and_the_summary(demo):
    result, out = demo
    table = result.output.partition("nonfinite")[2]
    assert "without clipping" in table
    assert "with gradclip" in table
    assert table.count("seed 0") == table.count("seed 1") == 2
    summary = json.loads((out / "results.json").read_text())["summary"]
    assert " ".join(summary.split()) in " ".join(result.output.split())


def test_demo_draws_a_picture(demo):
    picture = (demo[1] / "demo.png").read_bytes()
    assert picture.startswith(PNG_SIGNATURE)
    assert len(picture) > 20_000


def test_demo_writes_every_number(demo):
    results = json.loads((demo[1] / "results.json").read_text())
    assert results["settings"]["steps"] == 7
    assert results["settings"]["max_norm"] == 0.9
    assert [run["name"] for run in results["runs"]] == ["without clipping", "with gradclip"]
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


def test_both_runs_start_alike_and_clipping_parts_them(demo):
    curves = json.loads((demo[1] / "curves.json").read_text())
    plain, clipped = curves["without clipping"], curves["with gradclip"]
    assert np.shape(plain["loss"]) == np.shape(clipped["gradient_norm"]) == (2, 7)
    for name in ("loss", "gradient_norm"):
        first = [row[0] for row in plain[name]]
        assert first == pytest.approx([row[0] for row in clipped[name]], rel=1e-5)
    assert plain["loss"][0] != plain["loss"][1]
    assert plain["loss"][0][-1] != pytest.approx(clipped["loss"][0][-1], rel=1e-3)


def test_an_infinite_threshold_makes_the_runs_alike(tmp_path):
    result = run("demo", "--steps", 5, "--seeds", 1, "--max-norm", "inf", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    curves = json.loads((tmp_path / "curves.json").read_text())
    plain, clipped = curves["without clipping"], curves["with gradclip"]
    assert plain["loss"][0] == pytest.approx(clipped["loss"][0], rel=1e-3)
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["max_norm"] == "inf"


def test_divergence_is_reported_and_drawn(tmp_path):
    result = run("demo", "--steps", 6, "--seeds", 1, "--learning-rate", 3e38, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    seed = json.loads((tmp_path / "results.json").read_text())["runs"][0]["seeds"][0]
    assert seed["outcome"] == "diverged"
    assert seed["final_loss"] is None
    assert seed["test_accuracy"] == 0
    assert seed["nonfinite_loss_steps"] == 5
    assert seed["first_nonfinite_norm_step"] in (2, 3)
    assert "diverged" in result.output
    assert "nan" in json.loads((tmp_path / "curves.json").read_text())["without clipping"]["loss"][0]
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG_SIGNATURE)


def curves(losses, norms):
    return Curves(np.array(losses), np.array(norms), np.full(len(losses), 0.25))


def test_a_run_is_described_by_literal_numbers():
    measured = curves(
        losses=[[2.0, 1.0, 0.5, 0.1], [2.0, 3.0, math.nan, math.nan], [2.0, 2.0, math.inf, 2.0]],
        norms=[[0.5, 1.0, 1.5, 4.0], [1.5, math.inf, math.nan, math.nan], [math.nan] * 4],
    )
    learned, diverged, stalled = describe_run("run", measured, max_norm=1.0).seeds
    assert (learned.outcome, diverged.outcome, stalled.outcome) == (
        "learned",
        "diverged",
        "not learned",
    )
    assert (learned.final_loss, diverged.final_loss, stalled.final_loss) == (0.1, None, 2.0)
    # A norm equal to the threshold is not clipped, and one that is not finite does not count.
    assert (learned.clipped_share, diverged.clipped_share) == (0.5, 0.25)
    assert (learned.largest_finite_norm, stalled.largest_finite_norm) == (4.0, None)
    assert (learned.first_nonfinite_norm_step, diverged.first_nonfinite_norm_step) == (None, 2)
    assert (diverged.nonfinite_loss_steps, stalled.nonfinite_loss_steps) == (2, 1)


def test_the_summary_follows_the_numbers():
    good = describe_run("good", curves([[0.1], [0.2]], [[1.0], [1.0]]), 1.0)
    bad = describe_run("bad", curves([[2.3], [math.nan]], [[1.0], [math.nan]]), math.inf)
    settings = DemoSettings(steps=1, seeds=2, learning_rate=0.5, max_norm=1.0)
    assert summarise(bad, good, settings) == (
        "Without clipping, 0 of 2 seeds learned and 1 diverged (test accuracy 25.0% to 25.0%, "
        "median 25.0%); with gradclip at max_norm 1, 2 of 2 seeds learned (test accuracy 25.0% to "
        "25.0%, median 25.0%); both after 1 steps at learning rate 0.5."
    )
    assert summarise(good, bad, settings).startswith("Without clipping, 2 of 2 seeds learned (")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_a_picture_without_a_drawable_value_is_still_drawn(tmp_path, value, max_norm):
    nothing = describe_run("nothing", curves([[value] * 3], [[value] * 3]), max_norm)
    path = write_picture((nothing, nothing), "title", max_norm, tmp_path / "empty.png")
    assert path.read_bytes().startswith(PNG_SIGNATURE)


BAD_SETTINGS = [
    ("steps", 0, "steps must be a whole number of at least 1, got 0. Pass --steps 3000"),
    ("seeds", -1, "seeds must be a whole number of at least 1, got -1. Pass --seeds 5"),
    ("learning_rate", 0.0, "learning_rate must be positive and finite, got 0.0. Pass"),
    ("learning_rate", math.nan, "learning_rate must be positive and finite, got nan. Pass"),
    ("learning_rate", math.inf, "learning_rate must be positive and finite, got inf. Pass"),
    ("max_norm", -1.0, "max_norm must not be negative or NaN, got -1.0. To switch clipping off"),
    ("max_norm", math.nan, "max_norm must not be negative or NaN, got nan. To switch clipping off"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_SETTINGS)
def test_settings_refuse_what_cannot_work(name, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DemoSettings(**{name: value})


@pytest.mark.parametrize("value", [True, 1.5, "3"])
def test_settings_refuse_what_is_no_count(value):
    with pytest.raises(ValueError, match="steps must be a whole number"):
        DemoSettings(steps=value)


@pytest.mark.parametrize(("name", "value", "message"), BAD_SETTINGS)
def test_bad_options_end_in_one_line_and_write_nothing(tmp_path, name, value, message):
    out = tmp_path / "out"
    result = run("demo", f"--{name.replace('_', '-')}", value, "--out", out)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert "Traceback" not in result.output
    assert not out.exists()


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


def test_the_help_imports_no_framework():
    code = (
        "import sys; from typer.testing import CliRunner; from gradclip.cli.commands import app;"
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0;"
        "print([name for name in ('jax', 'optax', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    environment_path = [str(Path(entry.__file__).parents[2])]
    script = f"import sys; sys.path[:0] = {environment_path!r}; {code}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr
