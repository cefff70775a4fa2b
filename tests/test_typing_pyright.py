"""What pyright tells users of the programs in `typing_programs`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typed_programs import FILES, PROGRAMS, check


def test_right_programs_are_right_and_wrong_lines_are_errors():
    command = [sys.executable, "-m", "pyright", "--project", str(PROGRAMS), "--pythonpath", sys.executable]
    silent = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    found = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, check=False, env=silent)
    report = json.loads(found.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(FILES)
    errors = [one for one in report["generalDiagnostics"] if one["severity"] == "error"]
    check({(Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"] for one in errors})
