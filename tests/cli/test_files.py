"""`gradclip norm` and `gradclip check`: what they print, and how they end."""

import json
import math
import os
import pty
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from gradclip._src.cli import files
from gradclip._src.cli.commands import app


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "honest.npz", w=np.float32([3.0, 4.0]), n=np.array(100))
    save_file({"w": np.float32([3.0, 4.0]), "n": np.array(7)}, tmp_path / "honest.safetensors")
    torch.save({"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(7)}, tmp_path / "honest.pt")
    np.save(tmp_path / "bare.npy", np.array([3.0, 4.0]))
    np.savez(tmp_path / "forged.npz", w=np.float32([5.0, 1e-4]), n=np.array(100))
    np.savez(tmp_path / "nan.npz", w=np.float32([np.nan, np.inf]), n=np.array(100))
    np.savez(tmp_path / "incomplete.npz", w=np.float32([3.0, 4.0]))
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "honest.npz").read_bytes()[:100])
    (tmp_path / "empty.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["honest.npz", "honest.safetensors", "honest.pt", "bare.npy"])
def test_each_format(folder, name):
    done = run("norm", folder / name)
    assert (done.exit_code, done.exception) == (0, None)
    assert "The norm of 1 array with 2 numbers is 5" in done.output
    assert ("1 array of integers: 'n'." in done.output) == (name != "bare.npy")
    assert run("check", folder / name, "--max-norm", "5").exit_code == 0
    assert run("check", folder / name, "--max-norm", "4.9999999").exit_code == 1


def test_every_file_is_judged_in_a_line(folder):
    names = ("honest.npz", "forged.npz", "nan.npz", "incomplete.npz", "damaged.npz", "empty.safetensors", "bare.npy")
    files = [folder / name for name in names]
    done = run("check", *files, "--max-norm", "5", "--like", folder / "honest.pt")
    assert done.exit_code == 1
    said = [
        "accepted. The norm 5 is at most 5, and the names, shapes and dtypes of its 2 arrays are those of",
        "REFUSED. The norm 5 is larger than 5 by 1e-09.",
        "REFUSED. 'w' holds 1 NaN and 1 infinite of its 2 numbers.",
        "REFUSED. 'n' is missing.",
        "REFUSED. ",
        "REFUSED. It is empty. gradclip reads ",
        "REFUSED. 2 arrays are missing: 'w', 'n'; 'array' is not in the template.",
    ]
    *lines, last = done.output.splitlines()
    assert len(lines) == len(files)
    assert last == "1 accepted, 6 refused."
    for line, file, words in zip(lines, files, said, strict=True):
        assert line.startswith(f"{file}: {words}")


def test_the_last_line_counts_several_updates(folder):
    files = folder / "honest.npz", folder / "honest.pt"
    assert run("check", *files, "--max-norm", "5").output.splitlines()[-1] == "2 accepted, 0 refused."
    for alone in ([files[0]], [*files, "--together"]):
        assert run("check", *alone, "--max-norm", "9").output.count("\n") == 1


def test_without_a_template_integers_are_named(folder):
    output = run("check", folder / "honest.npz", "--max-norm", "5").output
    assert "1 array of integers ('n') does not count, so pass --like to have dtypes checked." in output


def test_norms_of_every_file(folder):
    done = run("norm", folder / "nan.npz", folder / "damaged.npz", folder / "forged.npz")
    first, second, third = done.output.splitlines()
    assert done.exit_code == 1
    assert first.endswith(
        "with 2 numbers is nan; 'w' holds 1 NaN and 1 infinite of its 2 numbers; 1 array of integers: 'n'."
    )
    assert "It cannot be measured; " in second
    assert "with 2 numbers is 5; " in third
    assert run("norm", folder / "nan.npz").exit_code == 0


@pytest.mark.parametrize(("ord", "norm"), [("1", 7.0), ("inf", 4.0), ("-inf", 3.0), ("2.5", 4.688140842343588)])
def test_orders(folder, ord, norm):
    (found,) = json.loads(run("norm", folder / "bare.npy", "--ord", ord, "--json").output)
    assert found["norm"] == pytest.approx(norm, rel=1e-12)
    assert found["ord"] in (float(ord), ord)
    if ord != "2.5":
        assert run("check", folder / "bare.npy", "--ord", ord, "--max-norm", norm).exit_code == 0
        assert run("check", folder / "bare.npy", "--ord", ord, "--max-norm", np.nextafter(norm, 0)).exit_code == 1


def test_json(folder):
    done = run("check", folder / "forged.npz", folder / "nan.npz", "--max-norm", "5", "--json")
    forged, bad = json.loads(done.output)
    assert done.exit_code == 1
    assert (forged["ok"], forged["max_norm"], forged["file"]) == (False, 5.0, str(folder / "forged.npz"))
    tiny = float(np.float32(1e-4))
    assert forged["excess"] == pytest.approx(tiny**2 / 10, rel=1e-8)
    assert (bad["norm"], bad["excess"]) == ("nan", "nan")
    assert bad["reason"] == "'w' holds 1 NaN and 1 infinite of its 2 numbers."
    (found,) = json.loads(run("norm", folder / "honest.npz", "--json").output)
    assert found == {
        "file": str(folder / "honest.npz"),
        "ord": 2.0,
        "norm": 5.0,
        "arrays": 1,
        "numbers": 2,
        "integers": ["n"],
        "nonfinite": [],
        "faults": [],
    }


def test_files_together_are_one_update(folder):
    files = folder / "honest.npz", folder / "bare.npy"
    (found,) = json.loads(run("norm", *files, "--together", "--json").output)
    assert found["norm"] == pytest.approx(math.sqrt(50))
    assert found["files"] == list(map(str, files))
    done = run("check", *files, "--together", "--max-norm", "7.1")
    assert done.output.startswith("2 files: accepted. The norm 7.07106781 is at most 7.1")
    assert run("check", *files, "--together", "--max-norm", "7").exit_code == 1


def test_hundreds_of_files_are_one_update(tmp_path):
    files = [tmp_path / f"{number}.npy" for number in range(300)]
    for file in files:
        np.save(file, np.ones(3, np.float32))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, limit[1]))
    try:
        assert run("check", "--together", *files, "--max-norm", "30").exit_code == 0
        assert run("check", "--together", *files, "--max-norm", "29.9").exit_code == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_an_answer_is_printed_before_the_next_file_is_read(folder, monkeypatch):
    said = []
    monkeypatch.setattr(typer, "echo", said.append)
    monkeypatch.setattr(files, "_arrays", lambda *_: said.append("read") or [])
    run("norm", folder / "honest.npz", folder / "honest.pt")
    assert [line.rpartition(": ")[0] or line for line in said] == [
        "read",
        str(folder / "honest.npz"),
        "read",
        str(folder / "honest.pt"),
    ]


def test_names_that_collide_get_the_name_of_their_file(folder, monkeypatch):
    monkeypatch.chdir(folder)  # long names are cut
    (folder / "more").mkdir()
    np.savez(folder / "more" / "nan.npz", w=np.array([np.nan]), x=np.array([np.inf]))
    output = run("norm", folder / "nan.npz", folder / "honest.npz", "--together").output
    assert "'nan.npz: w' holds 1 NaN" in output
    output = run("norm", "nan.npz", "more/nan.npz", "--together").output
    assert "nan.npz: w' holds 1 NaN and 0 infinite of its 1 numbers" in output
    assert "'x' holds 0 NaN and 1 infinite" in output


def test_the_update_between_two_checkpoints(folder):
    np.savez(folder / "after.npz", w=np.float32([3.0, 4.0 + 2.0**-20]), n=np.array(101))
    (found,) = json.loads(run("norm", folder / "after.npz", "--minus", folder / "honest.npz", "--json").output)
    assert (found["norm"], found["arrays"]) == (2.0**-20, 1)
    done = run("norm", folder / "after.npz", "--minus", folder / "bare.npy")
    assert done.exit_code == 1
    assert "It cannot be measured; " in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "honest.npz"], "Missing option '--max-norm'"),
        (["check", "--max-norm", "1"], "Missing argument 'FILE...'"),
        (["check", "honest.npz", "--max-norm", "-1"], "--max-norm must not be negative or NaN, got -1.0."),
        (["check", "honest.npz", "--max-norm", "nan"], "--max-norm must not be negative or NaN, got nan."),
        (["check", "honest.npz", "--max-norm", "much"], "Invalid value for '--max-norm': 'much' is not a number."),
        (["check", "honest.npz", "--max-norm", "1_0"], "Invalid value for '--max-norm': '1_0' is not a number."),
        (["norm", "honest.npz", "--ord", "1_0"], "--ord"),
        (["check", "honest.npz", "--max-norm", "1e400"], "1e400 is beyond float64's range. Pass inf"),
        (["check", "honest.npz", "--max-norm", "2e-400"], "2e-400 is beyond float64's range. Pass inf"),
        (["check", "none.npz", "--max-norm", "1"], "there is no file"),
        (["check", "honest.npz", "--max-norm", "1", "--like", "none.npz"], "there is no file"),
        (["check", "honest.npz", "--max-norm", "1", "--like", "damaged.npz"], "error: --like: "),
        (["check", "honest.npz", "--max-norm", "1", "--ord", "1.5"], "ord must be an integer from 1 to 8, inf or -inf"),
        (["norm", "honest.npz", "--ord", "0.5"], "ord must be a number >= 1"),
        (["norm", "honest.npz", "--ord", "two"], "ord must be a number >= 1"),
        (["norm", "honest.npz", "--ord", "9"], "ord must be at most 8"),
        (["norm", "none.npz"], "there is no file"),
        (["norm", "honest.npz", "--minus", "none.npz"], "there is no file"),
        (["norm", "a" * 300], "cannot be opened: File name too long."),
        (["norm", "honest.npz", "--minus", "honest.npz", "--together"], "Leave out --together."),
        (["norm", "honest.npz", "--unknown"], "No such option"),
    ],
)
def test_usage_errors_end_with_two(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_hostile_names_stay_in_their_line(tmp_path):
    file = tmp_path / "a\n\x1b[31m.npz"
    np.savez(file, **{"w\n\x1b[32m": np.array([np.nan])})
    done = run("check", file, "--max-norm", "1")
    assert done.output.count("\n") == 1
    assert done.output.strip().isprintable()


IN_A_NEW_PROCESS = r"""
import pathlib, re, sys
sys.argv = ["gradclip", *sys.argv[1:]]
from gradclip._src.cli.app import main
try:
    main()
except SystemExit as stopped:
    loaded = sorted({"torch", "jax", "tensorflow"} & sys.modules.keys())
    # Unlike ru_maxrss, which starts with what the process before it had.
    most = re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]
    print(stopped.code, loaded, int(most) // 1024)
"""


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    """A file of 256 MiB."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    numbers = np.random.default_rng(0).normal(size=1 << 22)
    save_file({f"w{i}": numbers for i in range(8)}, path)
    yield path
    path.unlink()


@pytest.mark.parametrize("order", ["1", "2", "3", "inf"])
def test_a_large_file_takes_little_memory_and_no_framework(large_file, order):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS, "check", large_file, "--max-norm=1", "--ord", order],
        capture_output=True,
        text=True,
        check=True,
    )
    said, ended = done.stdout.splitlines()
    assert "REFUSED. The norm " in said
    code, loaded, resident = ended.split(maxsplit=2)[0], "[]" in ended, int(ended.split()[-1])
    assert (code, loaded) == ("1", True)
    assert resident < 200
    assert done.stderr == ""


def test_a_terminal_sees_progress(folder):
    file = folder / "\x1b]0;title\x07large.safetensors"
    save_file({"w": np.ones(1 << 20, np.float32)}, file)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "gradclip", "norm", file],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        text=True,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\\x1b]0;title\\x07large.safetensors" in shown
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert "4.2" in shown
    assert done.stdout.strip().endswith("The norm of 1 array with 1,048,576 numbers is 1024.")
