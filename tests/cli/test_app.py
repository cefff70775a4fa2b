import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradclip
from gradclip._src.cli import app as entry
from gradclip._src.cli.commands import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def started(*arguments, **options):
    """What a new Python makes of `python -m gradclip` with these arguments."""
    command = [sys.executable, "-m", "gradclip", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def without(monkeypatch, *missing):
    monkeypatch.setattr(entry, "find_spec", lambda name: None if name in missing else object())


@pytest.mark.parametrize("arguments", [["info"], ["--version"]])
@pytest.mark.parametrize("missing", [["typer"], ["typer", "rich"]])
def test_info_and_version_do_without_typer(monkeypatch, capsys, arguments, missing):
    without(monkeypatch, *missing)
    monkeypatch.setattr(sys, "argv", ["gradclip", *arguments])
    entry.main()
    assert capsys.readouterr().out == run(*arguments).output


@pytest.mark.parametrize("arguments", [[], ["advise", "run.csv"], ["--help"]])
@pytest.mark.parametrize(
    ("missing", "message"),
    [(["typer"], "needs typer, not"), (["typer", "rich"], "needs typer and rich, not")],
)
def test_a_missing_command_line_says_what_to_install(monkeypatch, arguments, missing, message):
    without(monkeypatch, *missing)
    monkeypatch.setattr(sys, "argv", ["gradclip", *arguments])
    with pytest.raises(SystemExit, match=message) as stopped:
        entry.main()
    assert "pip install '.[cli]' in a clone of gradclip. These work without: gradclip info" in str(stopped.value)


@pytest.mark.parametrize("missing", [[], ["typer", "rich"]])
def test_the_demo_says_where_it_is(monkeypatch, capsys, missing):
    without(monkeypatch, *missing)
    monkeypatch.setattr(sys, "argv", ["gradclip", "demo", "--steps", "50"])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"{entry.DEMO}\n")
    assert (Path(__file__).parents[2] / "examples" / "gallery" / "loss_spike.py").exists()
    assert "make demo" in entry.DEMO
    assert "examples/gallery/loss_spike.py" in entry.DEMO


BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich", "click", "matplotlib", "torch", "jax", "tensorflow", "sklearn"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("typer", "rich") else found(name, *rest)
sys.argv = ["gradclip", *sys.argv[1:]]
from gradclip._src.cli.app import main
main()
"""


def test_a_bare_installation_tells_its_versions():
    command = [sys.executable, "-c", BARE]
    done = subprocess.run([*command, "info"], capture_output=True, text=True, check=True)
    assert done.stdout == run("info").output
    assert {"gradclip", "numpy", "tensorflow"} <= {line.split()[0] for line in done.stdout.splitlines()}
    norm = subprocess.run([*command, "norm"], capture_output=True, text=True, check=False)
    assert norm.returncode == 1
    assert norm.stderr.startswith("This command needs typer and rich, not installed here. To install:")


def test_the_version_is_told():
    assert run("--version").output == f"gradclip {gradclip.__version__}\n"


def test_the_short_option_for_help_helps():
    assert run("-h").output == run("--help").output
    assert run("norm", "-h").exit_code == 0


def test_the_module_is_the_command():
    done = started("--version", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gradclip {gradclip.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["info"], ["--version"], ["--help"]])
def test_a_full_device_ends_it_with_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = started(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output could not be written: [Errno 28]")
    assert done.stderr.count("\n") == 1


def test_a_pipe_that_nobody_reads_ends_it_in_silence():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        done = started("info", stdout=unread)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("arguments", ["info", "--version", "--help", ""])
def test_a_closed_output_ends_it_with_one_line(arguments):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m gradclip {arguments} >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: the output could not be written: standard output is closed.")
