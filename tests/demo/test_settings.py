"""Settings of the demo that cannot work."""

import math

import pytest
from typer.testing import CliRunner

from gradclip._src.cli.commands import app
from gradclip._src.demo.settings import DemoSettings, as_text, rates_from


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


BAD_SETTINGS = [
    ("steps", 0, "steps must be a whole number of at least 1, got 0. Pass --steps 1500"),
    ("seeds", -1, "seeds must be a whole number of at least 1, got -1. Pass --seeds 3"),
    ("rates", (0.0, 1.0), "rates must be positive, finite and rising, got 0,1. Pass --rates 0.002,"),
    ("rates", (0.2, 0.1), "rates must be positive, finite and rising, got 0.2,0.1. Pass"),
    ("rates", (0.1, 0.1), "rates must be positive, finite and rising, got 0.1,0.1. Pass"),
    ("rates", (math.nan,), "rates must be positive, finite and rising, got nan. Pass"),
    ("rates", (math.inf,), "rates must be positive, finite and rising, got inf. Pass"),
    ("max_norm", -1.0, "max_norm must not be negative or NaN, got -1.0. To switch clipping off"),
    ("max_norm", math.nan, "max_norm must not be negative or NaN, got nan. To switch clipping off"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_SETTINGS)
def test_settings_refuse_what_cannot_work(name, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DemoSettings(**{name: value})


def test_settings_refuse_no_rate():
    with pytest.raises(ValueError, match=r"^rates must be positive, finite and rising, got none\. Pass"):
        DemoSettings(rates=())


def test_rates_are_read_as_they_are_written():
    assert rates_from("0.1, 2e-3") == (0.1, 0.002)
    assert rates_from(as_text(DemoSettings.rates)) == DemoSettings.rates


@pytest.mark.parametrize("text", ["", "fast", "0.1,", "0.1;0.2"])
def test_rates_that_are_no_numbers_end_in_one_line(tmp_path, text):
    result = run("demo", "--rates", text, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: rates must be numbers with commas between them, got {text!r}. Pass")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [True, 1.5, "3"])
def test_settings_refuse_what_is_no_count(value):
    with pytest.raises(ValueError, match="steps must be a whole number"):
        DemoSettings(steps=value)


@pytest.mark.parametrize(("name", "value", "message"), BAD_SETTINGS)
def test_bad_options_end_in_one_line_and_write_nothing(tmp_path, name, value, message):
    out = tmp_path / "out"
    given = as_text(value) if name == "rates" else value
    result = run("demo", f"--{name.replace('_', '-')}", given, "--out", out)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert "Traceback" not in result.output
    assert not out.exists()
