"""`make ci` runs what CI runs on a clean clone, and says what failed and how to repeat it."""

import subprocess

import pytest

import ci

PASSES = '#!/usr/bin/env bash\ntest "$CI" = true && test ! -e new.txt && cat said.txt\n'
FAILS = (
    PASSES
    + "echo 'FAILED tests/test_a.py::test_b[x - y] - assert 1 == 2'\necho '    12 s  make every-test: FAILED'\nexit 1\n"
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with one commit, and a file that is not committed. Return a function that commits a `.ci/run`."""
    root = tmp_path / "project"
    (root / ".ci").mkdir(parents=True)
    (root / "said.txt").write_text("said by the run\n")
    monkeypatch.setattr(ci, "ROOT", root)

    def commit(script):
        (root / ".ci" / "run").write_text(script)
        settings = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        for arguments in (["init", "-q"], ["add", "."], [*settings, "commit", "-qm", "One"]):
            subprocess.run(["git", *arguments], cwd=root, check=True)
        (root / "new.txt").write_text("not committed")

    return commit


def test_what_passes(project, tmp_path, capfd):
    project(PASSES)
    assert ci.main(tmp_path / "clone") == 0
    output = capfd.readouterr().out.splitlines()
    assert output[0] == "Changes that are not committed are not tested."
    assert "said by the run" in output
    assert output[-1] == "Everything passed."
    assert not (tmp_path / "clone").exists()


def test_what_fails(project, tmp_path, capfd):
    project(FAILS)
    assert ci.main(tmp_path / "clone") == 1
    output = capfd.readouterr().out.splitlines()
    assert output[-3:] == [
        "failed: make every-test",
        "tests/test_a.py::test_b[x - y]",
        "  .venv/bin/python -m pytest 'tests/test_a.py::test_b[x - y]'",
    ]
    assert (tmp_path / "clone" / "said.txt").exists()


def test_a_folder_with_files_is_left_alone(project, tmp_path):
    project(PASSES)
    with pytest.raises(SystemExit, match="is not empty"):
        ci.main(tmp_path)
    assert (tmp_path / "project" / "said.txt").exists()


@pytest.mark.parametrize(
    ("test", "command"),
    [
        ("tests/trainers/test_a.py::test_b", "make trainers"),
        ("tests/site/test_a.py::test_b", "make docs"),
        (
            "src/gradclip/_src/functional/clip.py::gradclip.clip",
            ".venv/bin/python -m pytest 'src/gradclip/_src/functional/clip.py::gradclip.clip'",
        ),
    ],
)
def test_how_a_test_is_repeated(test, command):
    assert ci.repeat(test) == command


def test_many_failures_take_few_lines():
    parts = "   3 s  make look: FAILED\n   9 s  make every-test: FAILED\n"
    lines = ci.told(1, "".join(f"FAILED tests/test_a.py::test_{i} - no\n" for i in range(30)) + parts)
    assert len(lines) == 9 <= ci.MOST_LINES
    assert lines[:3] == ["failed: make look", "failed: make every-test", "tests/test_a.py::test_0"]
    assert lines[-1] == "and 27 more tests"


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (
            "   3 s  make lint: FAILED\n   4 s  make look: passed\n  12 s  make wheel: FAILED\n",
            ["failed: make lint", "failed: make wheel"],
        ),
        ("nothing that is known\n", [".ci/run ended with status 2"]),
        ("ERROR tests/test_a.py - no\n", ["tests/test_a.py", "  .venv/bin/python -m pytest 'tests/test_a.py'"]),
    ],
)
def test_what_is_told(output, lines):
    assert ci.told(2, output) == lines
