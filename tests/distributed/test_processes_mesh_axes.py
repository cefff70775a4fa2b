"""The tests that need eight devices, in a process where JAX has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eight_devices import ENVIRONMENT

FOLDER = Path(__file__).parents[1] / "sharded_jax"
FILES = sorted(map(str, FOLDER.glob("test_*.py")))


@pytest.mark.parametrize("files", [FILES[start::4] for start in range(4)], ids="abcd")
def test_on_eight_devices(files, pytestconfig):
    environment = os.environ | ENVIRONMENT
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER), "-m", pytestconfig.option.markexpr]
    options.append("--capture=sys")  # what XLA says as it ends a process goes past Python
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=FOLDER.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert " passed" in done.stdout
