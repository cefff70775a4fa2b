"""Arrays over two processes: after a timeout no process is left over."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import runs

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[1] / "examples" / "jax_two_processes.py"


def ended(*arguments):
    """Run the example in a process group; return its status, what it printed, and whether any of it still runs."""
    command = [sys.executable, "-Werror", str(EXAMPLE), *arguments]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        printed, errors = process.communicate(timeout=120)
    return process.returncode, printed, errors, runs(process.pid)


@pytest.mark.parametrize("arguments", [["--timeout", "0.5"], ["--processes", "1", "--timeout", "0.5"]], ids=str)
def test_nothing_is_left_over_after_a_timeout(arguments):
    status, _, errors, left = ended(*arguments)
    assert status != 0
    assert "TimeoutExpired" in errors
    assert not left
