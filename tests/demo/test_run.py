"""A short demo prints and writes what it found; a wrong option ends it before anything is trained."""

import io
import json
import math
from itertools import product

import pytest

from demo import DemoSettings, run_demo, settings_from

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
WRITTEN = {"demo.png", "report.html", "results.json"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of a few steps, with more seeds and rates than one and a threshold that clips some steps."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    options = ["--steps", "7", "--seeds", "2", "--rates", "0.01", "0.1", "--max-norm", "0.9", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as printed:
        patch.setattr("sys.stdout", printed)
        run_demo(settings_from(options))
        return printed.getvalue(), out


def results(demo):
    return json.loads((demo[1] / "results.json").read_text())


def test_demo_succeeds_and_names_what_it_wrote(demo):
    printed, out = demo
    assert {path.name for path in out.iterdir()} == WRITTEN
    for name in WRITTEN:
        assert str(out / name) in printed


def test_demo_prints_the_table_and_the_summary(demo):
    printed = " ".join(demo[0].split())
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "steps must be at least 1, got 0."),
        ("--steps 1.5", "argument --steps: invalid int value: '1.5'"),
        ("--seeds -1", "seeds must be at least 1, got -1."),
        ("--rates 0 1", "rates must be positive, finite and rising, got [0.0, 1.0]."),
        ("--rates 0.2 0.1", "rates must be positive, finite and rising, got [0.2, 0.1]."),
        ("--rates 0.1 0.1", "rates must be positive, finite and rising, got [0.1, 0.1]."),
        ("--rates nan", "rates must be positive, finite and rising, got [nan]."),
        ("--rates inf", "rates must be positive, finite and rising, got [inf]."),
        ("--rates fast", "argument --rates: invalid float value: 'fast'"),
        ("--rates", "argument --rates: expected at least one argument"),
        ("--max-norm -1", "max_norm must not be negative or NaN, got -1.0. Pass inf for no threshold."),
        ("--max-norm nan", "max_norm must not be negative or NaN, got nan. Pass inf for no threshold."),
    ],
)
def test_a_wrong_option_ends_it_and_writes_nothing(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        settings_from([*options.split(), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_takes_no_files_is_known_before_training(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("kept")
    for out in (file, file / "below", "/proc"):
        with pytest.raises(SystemExit) as stopped:
            settings_from(["--out", str(out)])
        assert stopped.value.code == 2
        assert str(out) in capsys.readouterr().err.splitlines()[-1]
    assert file.read_text() == "kept"


def test_without_options_it_takes_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_from([]) == DemoSettings()
    assert math.isfinite(DemoSettings.max_norm)
