"""Training with and without clipping: the same where nothing is clipped, and told where it diverges."""

import json

import pytest
from typer.testing import CliRunner

from gradclip.cli.commands import app

pytestmark = pytest.mark.slow
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
