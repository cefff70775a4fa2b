"""Settings of the demo that cannot work."""

import math

import pytest
from typer.testing import CliRunner

from gradclip.cli.commands import app
from gradclip.demo.settings import DemoSettings


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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
