"""What `make check` runs: the tests of what has changed."""

import subprocess

import pytest

import changed_tests
from changed_tests import ALWAYS, of_file, selected


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("src/gradclip/_src/tree.py", ["tests/test_tree.py", "tests/test_tree_prefixes.py"]),
        (
            "src/gradclip/_src/functional/clip.py",
            ["tests/functional/test_clip.py", "tests/functional/test_clip_everywhere.py"],
        ),
        ("src/gradclip/__init__.py", ["tests/test_init.py"]),
        ("src/gradclip/__main__.py", ["tests/cli/test_app.py"]),  # as tests/repository/test_mirror.py says
        ("src/gradclip/_src/native/reductions.hpp", ["tests/native"]),
        ("src/gradclip/py.typed", []),
        ("tests/core/test_rules.py", ["tests/core/test_rules.py"]),
        ("tests/support/subnormals.py", ["tests/exact/test_flushing.py"]),
        ("tests/sharded_jax/layouts.py", ["tests/distributed/test_processes_mesh_axes.py"]),
        ("tests/oracle/trees.py", ["tests/oracle/test_oracle.py"]),
        ("README.md", ["tests/test_readme.py"]),
        ("zensical.toml", ["tests/repository/test_pages.py"]),
        ("docs/monitor.md", ["tests/test_docs.py", "tests/repository/test_architecture.py"]),
        ("Makefile", []),
    ],
)
def test_files_lead_to_their_tests(name, files):
    assert set(files) <= set(of_file(name))
    assert bool(files) == bool(of_file(name))


def test_every_test_file_of_a_module_is_run_and_no_other():
    assert all(file.startswith("tests/core/test_norms") for file in of_file("src/gradclip/_src/core/norms.py"))


def test_a_helper_of_many_is_left_to_the_other_command(capsys):
    assert of_file("tests/support/frameworks.py") == []
    assert capsys.readouterr().err.startswith("tests/support/frameworks.py is used by ")


def test_the_files_it_names_exist():
    named = [*ALWAYS, *(file for files in changed_tests.SPECIAL.values() for file in files), *changed_tests.SPECIAL]
    assert [name for name in named if not (changed_tests.ROOT / name).exists()] == []


def test_each_file_is_run_once():
    twice = selected(["tests/test_tree.py", "src/gradclip/_src/tree.py", "src/gradclip/_src/tree.py"])
    assert twice == sorted({*ALWAYS, "tests/test_tree.py", "tests/test_tree_prefixes.py"})
    assert selected([]) == sorted(ALWAYS)


def test_what_has_changed(tmp_path, monkeypatch):
    someone = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
    git = lambda *words: subprocess.run(["git", *someone, *words], cwd=tmp_path, check=True)
    write = lambda name: (tmp_path / name).write_text("changed")
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    git("init", "-q", "-b", "main")
    write("gone.py"), write("old.py"), write("older.py")
    git("add", "."), git("commit", "-qm", "First")
    assert changed_tests.changed() == []
    git("checkout", "-qb", "other")
    write("committed.py"), (tmp_path / "old.py").write_text("otherwise")
    (tmp_path / "gone.py").unlink()
    git("add", "."), git("commit", "-qm", "Second")
    write("new.py")
    assert changed_tests.changed() == ["committed.py", "new.py", "old.py"]
    assert changed_tests.changed("other") == changed_tests.changed("no such branch") == ["new.py"]
