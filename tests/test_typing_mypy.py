"""What `mypy --strict` tells users of the programs in `typing_programs`."""

import os
import re
import subprocess
import sys

from typed_programs import FILES, ROOT, check


def test_right_programs_are_right_and_wrong_lines_are_errors():
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--follow-imports=silent"]
    command += ["--hide-error-context", "--cache-dir", str(ROOT / ".mypy_cache" / "programs"), *map(str, FILES)]
    from_source = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=from_source)
    assert found.stderr == ""
    errors = re.findall(r"(\w+\.py):(\d+): error: (.*)", found.stdout)
    check({(name, int(line)): text for name, line, text in errors})
