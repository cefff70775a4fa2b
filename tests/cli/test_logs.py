"""`gradclip advise` and `gradclip replay`: what they print, and how they end."""

import json
import sys

import pytest
from typer.testing import CliRunner

import training_logs
from gradclip._src.cli import logs
from gradclip._src.cli.commands import app


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def log(tmp_path):
    return training_logs.written(tmp_path, "trainer_state.json")


@pytest.mark.parametrize("name", training_logs.FILES)
@pytest.mark.parametrize("command", ["advise", "replay"])
def test_each_format(tmp_path, command, name):
    done = run(command, training_logs.written(tmp_path, name))
    assert (done.exit_code, done.exception) == (0, None)
    assert "40 steps" in done.output


def test_the_advice_is_told(log):
    output = run("advise", log, "--max-norm", "2").output
    assert "Clipped: 1 of 40 logged steps (2.5%), with max_norm = 2." in output
    assert "Step 200: the norm was 40" in output
    assert "There was 1 spike" in output


def test_numbers_as_json(log):
    found = json.loads(run("advise", log, "--json").output)
    assert (found["steps"], found["max_norm"], found["max_norm_is_assumed"]) == (40, 1.0, True)
    found = json.loads(run("replay", log, "--json", "--rule", "2", "--rule", "inf").output)
    assert [(one["rule"], one["clipped_share"], one["spikes_stopped"]) for one in found["rules"]] == [
        ("2", 0.025, 1),
        ("inf", 0.0, 0),
    ]


def test_the_rules_if_none_is_given(log):
    found = json.loads(run("replay", log, "--json", "--max-norm", "0.5").output)
    assert [one["rule"] for one in found["rules"]] == ["0.5", "1.0", "adaptive", "quantile", "skip"]
    found = json.loads(run("replay", log, "--json").output)
    assert [one["rule"] for one in found["rules"]] == ["1", "adaptive", "quantile", "skip"]


def test_a_table_of_rules(log):
    lines = run("replay", log, "--rule", "2", "--rule", "skip").output.splitlines()
    assert any(line.split()[:6] == ["2", "2.5%", "0.0%", "1", "of", "1"] for line in lines)


def test_the_name_of_a_rule_stays_in_one_line(log):
    rule = "quantile:factor=3,window=64,lower=0.01"
    lines = run("replay", log, "--rule", rule).output.splitlines()
    assert any(line.split()[:2] == [rule, "2.5%"] for line in lines)


@pytest.mark.parametrize("command", ["advise", "replay"])
def test_a_picture(log, tmp_path, command):
    path = tmp_path / "picture.png"
    assert run(command, log, "--out", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["advise", "replay"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00" * 100, b'{"log_history": [{', b"step,loss\n1,2\n"])
def test_what_cannot_be_read_ends_with_one_line(tmp_path, command, content):
    path = tmp_path / "log\n\x1b[31m"
    path.write_bytes(content)
    for given in (path, tmp_path / "none"):
        done = run(command, given)
        assert done.exit_code == 1
        assert done.output.startswith("error: ")
        assert done.output.count("\n") == 1
        assert done.output.strip().isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "median"], "there is no rule 'median'"),
        (["--rule", "-1"], "must not be negative"),
        (["--rule", "quantile:factor=0"], "factor must be from"),
        (["--max-norm", "nan"], "--max-norm must not be negative or NaN, got nan"),
        (["--max-norm", "-2"], "--max-norm must not be negative"),
        (["--max-norm", "much"], "Invalid value for '--max-norm'"),
        (["--max-norm", "1_0"], "Invalid value for '--max-norm': '1_0' is not a number."),
        (["--unknown"], "No such option"),
    ],
)
def test_usage_errors_end_with_two(log, arguments, message):
    done = run("replay", log, *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_picture_that_cannot_be_written(log, tmp_path):
    for out in (tmp_path / "none" / "a.png", tmp_path / "a.unknown", tmp_path):
        done = run("advise", log, "--out", out)
        assert done.exit_code == 2
        assert done.output.startswith("error: could not write to")
        assert done.output.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(log, tmp_path, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("gradclip._src.monitor.page.picture", "gradclip._src.logs.picture"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("replay", log, "--out", tmp_path / "a.png")
    assert done.exit_code == 1
    assert "error: Pictures need matplotlib" in done.output
    assert run("replay", log).exit_code == 0


def test_the_default_rules_are_rules():
    from gradclip._src.logs.replay import ThresholdRule

    assert [ThresholdRule.parse(text).name for text in logs._DEFAULT_RULES] == ["1.0", "adaptive", "quantile", "skip"]
