"""A script runs with another copy of the source, also where gradclip is installed in an editable way."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "with_source.py"


def run(source, *options, cwd):
    (cwd / "beside.py").write_text("word = 'beside'\n")
    (cwd / "shown.py").write_text("import sys, gradclip, beside\nprint(gradclip.__file__, beside.word, sys.argv[1:])\n")
    command = [sys.executable, SCRIPT, source, "shown.py", *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_script_runs_with_another_copy(tmp_path):
    other = tmp_path / "other" / "gradclip"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    found = run(other.parent, "--only", "x", cwd=tmp_path)
    assert found.stdout == f"{other / '__init__.py'} beside ['--only', 'x']\n"


def test_a_folder_without_gradclip_is_an_error(tmp_path):
    found = run(tmp_path, cwd=tmp_path)
    assert found.returncode != 0
    assert "not from" in found.stderr or "No module named 'gradclip'" in found.stderr
